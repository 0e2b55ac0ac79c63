"""Every mistake a user can make has a type and a sentence: what, expected, got, what to do.

All derive from `ErrbarError`. Where a built-in exception says the same thing (`ValueError`, `TypeError`,
`OSError`, `MemoryError`), the type derives from that too, so that generic handlers keep working.
"""

from collections.abc import Mapping
from types import MappingProxyType


class ErrbarError(Exception):
    """Base of all errors that errbar raises on purpose.

    `arguments` are the arguments that the sentence writes out, with their values, or a tuple of values: `{"precision":
    "float64"}` where it says `precision='float64'`. So the command line can say `--precision float64` instead.
    """

    arguments: Mapping[str, object] = MappingProxyType({})

    def __init__(self, message: str = "", *, arguments: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        if arguments:
            self.arguments = dict(arguments)


class ArgumentError(ErrbarError, ValueError):
    """An argument has a value that cannot be used: an unknown option, a prior that is not positive, a bad seed."""


class SelectionError(ArgumentError):
    """The parameters asked for do not exist or do nothing, or the question which ones is not answered exactly once."""


class DataError(ErrbarError, ValueError):
    """The data cannot be read: empty, a bare tensor, a batch of unknown form, NaN or infinite input."""


class LabelError(DataError):
    """Labels are missing where they are needed, or are not integers in 0 … M−1."""


class ModelError(ErrbarError, ValueError):
    """The model cannot be used: it returns probabilities or no logits at all, mixes samples, or has no derivative."""


class WeightsChangedError(ModelError):
    """The model's weights are not those of the fit."""


class MismatchError(ErrbarError, ValueError):
    """Two values do not belong together: other weights, other parameters, other classes, other sizes."""


class CovarianceError(ErrbarError, ValueError):
    """A matrix that should be a covariance is not: not symmetric, not positive semi-definite, not finite."""


class SingularCovarianceError(CovarianceError):
    """A covariance would have to be inverted and is singular."""


class ForgetError(ErrbarError, ValueError):
    """Data are to be forgotten that were never seen."""


class SizeError(ErrbarError, MemoryError):
    """The result would not fit into memory; nothing was allocated."""


class RankError(ErrbarError, RuntimeError):
    """Another process of the job failed with an error of its own, died, or did not answer in time."""


class FileError(ErrbarError, OSError):
    """A file cannot be read or written: it is missing, no file of errbar, of a newer format, or the disk is full."""


class DamagedFileError(FileError):
    """A file is not what was written: cut off, changed, or made to look like a file of errbar."""


class ExportError(ErrbarError, ValueError):
    """A posterior cannot be exported: the graph would need what ONNX or torch.export cannot hold."""


class MissingExtraError(ErrbarError, ImportError):
    """An optional dependency is needed and not installed."""


class CalibrationWarning(UserWarning):
    """The best temperature or covariance scale lies at the edge of the search, or held-out data are not held out."""


class PosteriorWarning(UserWarning):
    """A fitted posterior should not be used before it is calibrated.

    It contradicts the network on training inputs, or the network knows its training data by heart, so that they hold
    hardly any information.
    """


class StructureNotice(UserWarning):
    """A structure is not what its name promises.

    `structure="auto"` took one that is not exact, because the exact one does not fit into memory; or `kron` takes some
    layers as `diag` does, because it cannot take them apart.
    """


class CostNotice(UserWarning):
    """What begins now takes long by the costs of `errbar.plan`; the sentence says what would be quicker."""


class FusionNotice(UserWarning):
    """Frames were fused by a formula whose assumption they do not meet; the sentence says what to use instead."""


class DataWarning(UserWarning):
    """The data are not what they seem: a part that looks as if it mattered is ignored, such as a weight for each
    sample; or many samples are equal where labels are drawn."""


def how_to_install(extra: str) -> str:
    """What to type for an optional dependency. The package is in no index, so `pip install errbar[…]` finds nothing.

    >>> how_to_install("cli")
    "pip install '.[cli]' in a clone of errbar"
    """
    return f"pip install '.[{extra}]' in a clone of errbar"
