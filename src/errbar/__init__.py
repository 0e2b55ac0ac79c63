"""errbar: error bars on the class probabilities of neural-network classifiers.

posterior = errbar.fit(model, train_batches, last_layers=2, prior=errbar.Prior(6.0))
posterior = errbar.calibrate(posterior, validation_batches)
prediction = posterior.predict(x)
prediction.pmf, prediction.covariance, prediction.risk(0.05)
"""

from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType

from errbar import metrics
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._distributions.prediction import Prediction
from errbar._files.load import FileDescription, info, load, merge, verify
from errbar._monitor.martingales import Alarm
from errbar._monitor.monitor import Monitor
from errbar._operations.calibrate import calibrate
from errbar._operations.choose_prior import choose_prior
from errbar._operations.decisions import AbstentionRule, ConformalRule, Decision, abstention, conformal, decide
from errbar._operations.fusion import fuse, fuse_frames
from errbar._operations.outliers import OutlierScores, outlier_scores, rank_outliers
from errbar._planning.plan import Option, Plan, plan
from errbar._posterior.collect import collect
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior, condition, fit
from errbar._posterior.prior import Prior
from errbar.errors import (
    ArgumentError,
    CalibrationWarning,
    CovarianceError,
    DamagedFileError,
    DataError,
    DataWarning,
    ErrbarError,
    ExportError,
    FileError,
    ForgetError,
    LabelError,
    MismatchError,
    MissingExtraError,
    ModelError,
    RankError,
    SelectionError,
    SingularCovarianceError,
    SizeError,
    StructureNotice,
    WeightsChangedError,
)
from errbar.version import __version__

__all__ = [
    "AbstentionRule",
    "Alarm",
    "ArgumentError",
    "CalibrationWarning",
    "ConformalRule",
    "CovarianceError",
    "DamagedFileError",
    "DataError",
    "DataWarning",
    "Decision",
    "ErrbarError",
    "ExportError",
    "FileDescription",
    "FileError",
    "ForgetError",
    "Information",
    "JointLogits",
    "LabelError",
    "LogitGaussian",
    "MismatchError",
    "MissingExtraError",
    "ModelError",
    "Monitor",
    "Option",
    "OutlierScores",
    "Plan",
    "Posterior",
    "Prediction",
    "Prior",
    "RankError",
    "SelectionError",
    "SingularCovarianceError",
    "SizeError",
    "StructureNotice",
    "WeightsChangedError",
    "__version__",
    "abstention",
    "calibrate",
    "choose_prior",
    "collect",
    "condition",
    "conformal",
    "decide",
    "fit",
    "fuse",
    "fuse_frames",
    "info",
    "load",
    "merge",
    "metrics",
    "outlier_scores",
    "plan",
    "rank_outliers",
    "verify",
]

# Modules that are imported when they are first used, because they need more than the package does: a package that must
# be installed for that, or none.
_LATER = {"lightning": ("lightning", "pytorch_lightning"), "plots": (), "report": (), "sklearn": ("sklearn",)}


def __getattr__(name: str) -> _ModuleType:
    """`errbar.plots` and the like after a mere `import errbar`."""
    if name not in _LATER:
        raise AttributeError(f"module 'errbar' has no attribute {name!r}")
    return _import_module(f"errbar.{name}")


def __dir__() -> list[str]:
    """All that is here, with those modules whose packages are installed."""
    later = [name for name, needs in _LATER.items() if not needs or any(map(_find_spec, needs))]
    return sorted({*globals(), *later})
