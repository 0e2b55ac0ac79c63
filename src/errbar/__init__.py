"""errbar: error bars on the class probabilities of neural-network classifiers.

posterior = errbar.fit(model, train_batches, last_layers=2, prior=errbar.Prior(6.0))
posterior = errbar.calibrate(posterior, validation_batches)
prediction = posterior.predict(x)
prediction.pmf, prediction.covariance, prediction.risk(0.05)
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from errbar.errors import (
    ArgumentError,
    CalibrationWarning,
    CostNotice,
    CovarianceError,
    DamagedFileError,
    DataError,
    DataWarning,
    ErrbarError,
    ExportError,
    FileError,
    ForgetError,
    FusionNotice,
    LabelError,
    MismatchError,
    MissingExtraError,
    ModelError,
    PosteriorWarning,
    RankError,
    SelectionError,
    SingularCovarianceError,
    SizeError,
    StructureNotice,
    WeightsChangedError,
)
from errbar.version import __version__

if "torch" in _sys.modules and _sys.modules["torch"].distributed.is_available():
    # Five milliseconds, because a script may call `init_process_group` next: `_distributed/team.py` says what for.
    _import_module("torch.distributed.nn.functional")

if _TYPE_CHECKING:
    from errbar import metrics
    from errbar._calibration.calibrate import calibrate
    from errbar._choosing.autofit import autofit
    from errbar._choosing.choice import Choice, Row
    from errbar._choosing.choose_prior import choose_prior
    from errbar._deciding.acquire import acquire
    from errbar._deciding.decisions import AbstentionRule, ConformalRule, Decision, abstention, conformal, decide
    from errbar._deciding.outliers import OutlierScores, outlier_scores, rank_outliers
    from errbar._distributions.calibration import Calibration
    from errbar._distributions.logits import JointLogits, LogitGaussian
    from errbar._distributions.prediction import LabelPrediction, Prediction
    from errbar._files.load import FileDescription, FusionDescription, info, load, merge, verify
    from errbar._fusion.calibrate_fusion import calibrate_fusion
    from errbar._fusion.fuse import fuse, fuse_frames
    from errbar._fusion.fused import FusedClassifier
    from errbar._fusion.track import Track, frame_noise
    from errbar._fusion.track_choice import calibrate_track
    from errbar._monitor.martingales import Alarm
    from errbar._monitor.monitor import Monitor
    from errbar._planning.plan import Option, Plan, plan
    from errbar._posterior.collect import collect
    from errbar._posterior.fit import fit
    from errbar._posterior.information import Information
    from errbar._posterior.posterior import Posterior, condition
    from errbar._posterior.prior import Prior

__all__ = [
    "AbstentionRule",
    "Alarm",
    "ArgumentError",
    "Calibration",
    "CalibrationWarning",
    "Choice",
    "ConformalRule",
    "CostNotice",
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
    "FusedClassifier",
    "FusionDescription",
    "FusionNotice",
    "Information",
    "JointLogits",
    "LabelError",
    "LabelPrediction",
    "LogitGaussian",
    "MismatchError",
    "MissingExtraError",
    "ModelError",
    "Monitor",
    "Option",
    "OutlierScores",
    "Plan",
    "Posterior",
    "PosteriorWarning",
    "Prediction",
    "Prior",
    "RankError",
    "Row",
    "SelectionError",
    "SingularCovarianceError",
    "SizeError",
    "StructureNotice",
    "Track",
    "WeightsChangedError",
    "__version__",
    "abstention",
    "acquire",
    "autofit",
    "calibrate",
    "calibrate_fusion",
    "calibrate_track",
    "choose_prior",
    "collect",
    "condition",
    "conformal",
    "decide",
    "fit",
    "frame_noise",
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

# Where each name comes from. It is imported when it is first used, with what it needs and no more: `errbar --help`
# needs no torch.
_NAMES = {
    "_distributions.calibration": ("Calibration",),
    "_distributions.logits": ("JointLogits", "LogitGaussian"),
    "_distributions.prediction": ("LabelPrediction", "Prediction"),
    "_files.load": ("FileDescription", "FusionDescription", "info", "load", "merge", "verify"),
    "_monitor.martingales": ("Alarm",),
    "_monitor.monitor": ("Monitor",),
    "_deciding.acquire": ("acquire",),
    "_choosing.autofit": ("autofit",),
    "_calibration.calibrate": ("calibrate",),
    "_fusion.calibrate_fusion": ("calibrate_fusion",),
    "_choosing.choice": ("Choice", "Row"),
    "_choosing.choose_prior": ("choose_prior",),
    "_deciding.decisions": ("AbstentionRule", "ConformalRule", "Decision", "abstention", "conformal", "decide"),
    "_fusion.fused": ("FusedClassifier",),
    "_fusion.fuse": ("fuse", "fuse_frames"),
    "_deciding.outliers": ("OutlierScores", "outlier_scores", "rank_outliers"),
    "_fusion.track": ("Track", "frame_noise"),
    "_fusion.track_choice": ("calibrate_track",),
    "_planning.plan": ("Option", "Plan", "plan"),
    "_posterior.collect": ("collect",),
    "_posterior.fit": ("fit",),
    "_posterior.information": ("Information",),
    "_posterior.posterior": ("Posterior", "condition"),
    "_posterior.prior": ("Prior",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

# Public modules, and the packages of which one must be installed for them.
_MODULES = {
    "lightning": ("lightning", "pytorch_lightning"),
    "metrics": (),
    "plots": (),
    "report": (),
    "sklearn": ("sklearn",),
}


def __getattr__(name: str) -> _Any:
    """`errbar.fit`, `errbar.plots` and the like after a mere `import errbar`."""
    if name in _MODULES:
        return _import_module(f"errbar.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'errbar' has no attribute {name!r}")
    value = getattr(_import_module(f"errbar.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """What is public, with those modules whose packages are installed: what tab completion should offer."""
    modules = [name for name, needs in _MODULES.items() if not needs or any(map(_find_spec, needs))]
    return sorted({*__all__, *modules, "errors"})
