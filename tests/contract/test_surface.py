"""The public surface, and what importing the package does and does not do."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import errbar
from source_tree import MODULES, SOURCE

PUBLIC = {
    # values
    "AbstentionRule",
    "Alarm",
    "Calibration",
    "Choice",
    "ConformalRule",
    "Decision",
    "FileDescription",
    "FusedClassifier",
    "FusionDescription",
    "Information",
    "JointLogits",
    "LabelPrediction",
    "LogitGaussian",
    "Option",
    "OutlierScores",
    "Plan",
    "Monitor",
    "Posterior",
    "Prediction",
    "Prior",
    "Row",
    "Track",
    # functions
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
    "outlier_scores",
    "plan",
    "rank_outliers",
    "verify",
    # modules
    "metrics",
    # errors and warnings
    "ArgumentError",
    "CalibrationWarning",
    "CostNotice",
    "CovarianceError",
    "DamagedFileError",
    "DataError",
    "DataWarning",
    "ErrbarError",
    "ExportError",
    "FileError",
    "ForgetError",
    "FusionNotice",
    "LabelError",
    "MismatchError",
    "MissingExtraError",
    "ModelError",
    "PosteriorWarning",
    "RankError",
    "SelectionError",
    "SingularCovarianceError",
    "SizeError",
    "StructureNotice",
    "WeightsChangedError",
    "__version__",
}

# ----------------------------------------------------------------------------------------------------- the surface


def test_exported_names_are_these_and_no_others() -> None:
    assert set(errbar.__all__) == PUBLIC
    assert list(errbar.__all__) == sorted(errbar.__all__)
    for name in PUBLIC:
        assert hasattr(errbar, name)
    visible = {name for name, value in vars(errbar).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible == {name for name in PUBLIC if not name.startswith("_") and name != "metrics"}


def test_type_checkers_see_the_names_that_are_imported_when_used() -> None:
    tree = ast.parse(MODULES[""].read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "_TYPE_CHECKING"]
    seen = {
        alias.name: node.module.removeprefix("errbar.")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module != "errbar"
        for alias in node.names
    }
    assert seen == errbar._MODULE_OF
    at_once = {name for name in PUBLIC if name in vars(errbar.errors)} | {"__version__", "metrics"}
    assert seen.keys() == PUBLIC - at_once


def test_importing_the_package_imports_no_torch() -> None:
    script = "import sys, errbar; print('torch' in sys.modules, 'numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_every_public_name_has_a_docstring() -> None:
    for name in PUBLIC - {"__version__"}:
        thing = getattr(errbar, name)
        assert inspect.getdoc(thing), name


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "log_likelihood",
        "nll",
        "brier",
        "ece",
        "ece_literal",
        "reliability",
        "aurc",
        "auroc",
        "risk_coverage",
        "roc",
    ],
)
def test_every_metric_of_the_contract_has_a_docstring(name: str) -> None:
    function = getattr(errbar.metrics, name)
    assert inspect.getdoc(function)
    first, second = list(inspect.signature(function).parameters)[:2]
    assert (first, second) == (("scores", "positive") if name in ("auroc", "roc") else ("pmf", "labels"))


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (
            errbar.collect,
            {
                "last_layers": None,
                "parameters": None,
                "fisher": "ggn",
                "structure": "dense",
                "precision": None,
                "unpack": None,
                "group": None,
                "checkpoint": None,
                "progress": False,
                "outputs": "classes",
            },
        ),
        (errbar.condition, {"model": None}),
        (errbar.fit, {"last_layers": None, "parameters": None, "fisher": "ggn", "structure": "dense", "group": None}),
        (errbar.calibrate, {"objective": "nll", "fit": ("temperature", "covariance_scale"), "group": None}),
        (errbar.Posterior.update, {"unpack": None, "group": None}),
        (errbar.Posterior.forget, {"unpack": None, "group": None}),
        (errbar.fuse, {"raw": False}),
        (errbar.fuse_frames, {"raw": False, "noise": None}),
        (errbar.Track, {"noise": None, "memory": 1.0, "evidence": None}),
        (errbar.Track.predict, {"samples": 1000, "seed": 0}),
        (errbar.Posterior.predict, {"samples": 1000, "seed": 0}),
        (errbar.LogitGaussian.predict, {"samples": 1000, "seed": 0}),
        (errbar.Prediction.interval, {"level": 0.95}),
        (errbar.Prior, {"precision": 1.0}),
        (errbar.metrics.ece, {"bins": 10}),
    ],
)
def test_defaults_are_those_of_the_contract(function: object, defaults: dict[str, object]) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    for name, default in defaults.items():
        assert parameters[name].default == default


@pytest.mark.parametrize(
    ("value", "members"),
    [
        (errbar.Prior, ["from_weight_decay"]),
        (
            errbar.Information,
            [
                "model",
                "n_parameters",
                "parameter_names",
                "dense",
                "__add__",
                "__sub__",
                "__mul__",
                "save",
                "with_model",
            ],
        ),
        (
            errbar.Posterior,
            [
                "model",
                "covariance",
                "logits",
                "predict",
                "joint_logits",
                "update",
                "forget",
                "sample_parameters",
                "predict_by_parameters",
                "log_evidence",
                "with_prior",
                "to",
                "save",
                "export",
            ],
        ),
        (
            errbar.LogitGaussian,
            ["variance", "tempered", "scaled", "centered", "predict", "__len__", "__getitem__"],
        ),
        (errbar.Track, ["add", "logits", "predict", "frames", "surprise", "p_value", "save", "load"]),
        (
            errbar.Prediction,
            [
                "covariance",
                "std",
                "label",
                "confidence",
                "standard_error",
                "risk",
                "interval",
                "entropy",
                "mutual_information",
                "samples",
            ],
        ),
    ],
)
def test_values_have_the_members_of_the_contract(value: type, members: list[str]) -> None:
    for member in members:
        assert hasattr(value, member), member


def values() -> list[object]:
    torch.manual_seed(0)
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    posterior = errbar.fit(nn.Linear(4, 3), [(x, y)], last_layers=1)
    prediction = posterior.predict(x, samples=10)
    return [
        posterior,
        posterior.information,
        posterior.prior,
        posterior.logits(x),
        posterior.joint_logits(x),
        prediction,
        errbar.outlier_scores(posterior, [(x, y)], samples=10),
        errbar.Track(posterior).add(x[:1]),
        errbar.metrics.reliability(prediction.pmf, y),
    ]


@pytest.mark.parametrize("index", range(9))
def test_values_are_frozen(index: int) -> None:
    value = values()[index]
    assert dataclasses.is_dataclass(value)
    for name in [field.name for field in dataclasses.fields(value)]:
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(value, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError, match="anything"):
        value.anything = 1  # type: ignore[attr-defined]


def test_the_covariance_of_a_prediction_is_computed_when_it_is_read() -> None:
    gaussian = errbar.LogitGaussian(torch.zeros(1, 3), torch.eye(3)[None])
    prediction = gaussian.predict(samples=10)
    assert "covariance" not in vars(prediction)
    assert prediction.covariance.shape == (1, 3, 3)
    assert prediction.covariance is prediction.covariance


# ------------------------------------------------------------------------------------------------------- importing


def test_importing_the_package_needs_no_extra() -> None:
    extras = ["matplotlib", "sklearn", "typer", "rich", "scipy", "pandas", "hypothesis", "beartype", "curvlinops"]
    extras += ["onnx", "onnxruntime", "onnxscript", "fastapi", "uvicorn", "prometheus_client", "PIL"]
    script = f"import sys; from errbar import *; print([name for name in {extras!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"


def test_tab_completion_offers_what_is_public() -> None:
    offered = set(dir(errbar))
    assert offered >= PUBLIC
    assert offered - PUBLIC <= {"__version__", "errors", "lightning", "plots", "report", "sklearn"}


@pytest.mark.parametrize("name", ["lightning", "plots", "report", "sklearn"])
def test_modules_that_need_more_are_attributes_that_are_imported_when_used(name: str) -> None:
    """As the README writes them, after a mere `import errbar`."""
    pytest.importorskip({"plots": "errbar", "report": "errbar"}.get(name, name))
    script = (
        "import sys, errbar; before = 'errbar.{0}' in sys.modules; listed = '{0}' in dir(errbar); "
        "print(before, listed, errbar.{0}.__name__, errbar.{0} is sys.modules['errbar.{0}'])"
    )
    command = [sys.executable, "-W", "ignore", "-c", script.format(name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.split() == ["False", "True", f"errbar.{name}", "True"]


def test_a_module_whose_package_is_missing_says_what_to_install() -> None:
    script = (
        "import sys\nfor name in ('sklearn', 'lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
        "import errbar\n"
        "for name in ('sklearn', 'lightning'):\n"
        "    try:\n        getattr(errbar, name)\n"
        "    except errbar.MissingExtraError as error:\n        print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    first, second = run.stdout.splitlines()
    assert "pip install '.[sklearn]' in a clone of errbar" in first
    assert "pip install lightning" in second


def test_other_attributes_are_still_missing() -> None:
    with pytest.raises(AttributeError, match=r"module 'errbar' has no attribute 'plot'"):
        errbar.plot  # noqa: B018


def test_no_message_names_an_installation_that_cannot_work() -> None:
    """The package is in no index: what is to be typed starts from a clone."""
    texts = [*MODULES.values(), *SOURCE.parents[1].glob("README.md"), *SOURCE.parents[1].glob("docs/*.md")]
    found = [path.name for path in texts if re.search(r"pip install '?errbar", path.read_text(encoding="utf-8"))]
    assert found == ["errors.py"]  # where the reason is given


def test_importing_the_package_says_nothing_and_changes_no_global_state() -> None:
    script = (
        "import torch; torch.manual_seed(0); a = torch.get_rng_state(), torch.get_default_dtype(), "
        "torch.is_grad_enabled(), torch.get_num_threads(); from errbar import *; b = torch.get_rng_state(), "
        "torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(); "
        "assert torch.equal(a[0], b[0]) and a[1:] == b[1:]"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()
