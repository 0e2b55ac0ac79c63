"""The public surface, the direction of imports and what importing costs: the shape of the package is itself tested."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import errbar

SOURCE = Path(errbar.__file__).parent

PUBLIC = {
    # values
    "AbstentionRule",
    "Alarm",
    "ConformalRule",
    "Decision",
    "FileDescription",
    "Information",
    "JointLogits",
    "LogitGaussian",
    "Option",
    "OutlierScores",
    "Plan",
    "Monitor",
    "Posterior",
    "Prediction",
    "Prior",
    # functions
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
    "outlier_scores",
    "plan",
    "rank_outliers",
    "verify",
    # modules
    "metrics",
    # errors and warnings
    "ArgumentError",
    "CalibrationWarning",
    "CovarianceError",
    "DamagedFileError",
    "DataError",
    "DataWarning",
    "ErrbarError",
    "ExportError",
    "FileError",
    "ForgetError",
    "LabelError",
    "MismatchError",
    "MissingExtraError",
    "ModelError",
    "RankError",
    "SelectionError",
    "SingularCovarianceError",
    "SizeError",
    "StructureNotice",
    "WeightsChangedError",
    "__version__",
}

# From the bottom to the top: a package, or a module beside them, imports only from those above it in this list.
PACKAGES = [
    "version",
    "errors",
    "_base",
    "_model",
    "metrics",
    "_distributed",
    "_distributions",
    "_derivative",
    "_curvature",
    "_planning",
    "_posterior",
    "_files",
    "_export",
    "_operations",
    "_monitor",
    "plots",
    "report",
    "sklearn",
    "lightning",
    "experiments",
    "demo",
    "serve",
    "cli",
    "__main__",
]

# Where a value has a method that belongs to a higher package, that is imported inside the method. There are no others.
DOORS = {
    ("_posterior.collect", "_files.checkpoint"),
    ("_posterior.information", "_files.save"),
    ("_posterior.posterior", "_files.save"),
    ("_posterior.posterior", "_export.write"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: a relative import"
            module = node.module or ""
            inside = [f"{module}.{alias.name}" for alias in node.names]
            submodules = [name for name in inside if name.removeprefix("errbar.") in MODULES]
            names = submodules if len(submodules) == len(inside) else [module, *submodules]
        found.update(name.partition(".")[2] for name in names if name.split(".")[0] == "errbar")
    return found


# ----------------------------------------------------------------------------------------------------- the surface


def test_exported_names_are_these_and_no_others() -> None:
    assert set(errbar.__all__) == PUBLIC
    assert list(errbar.__all__) == sorted(errbar.__all__)
    for name in PUBLIC:
        assert hasattr(errbar, name)
    visible = {name for name, value in vars(errbar).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible == {name for name in PUBLIC if not name.startswith("_") and name != "metrics"}


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
            },
        ),
        (errbar.condition, {"model": None}),
        (errbar.fit, {"last_layers": None, "parameters": None, "fisher": "ggn", "structure": "dense", "group": None}),
        (errbar.calibrate, {"objective": "nll", "fit": ("temperature", "covariance_scale"), "group": None}),
        (errbar.Posterior.update, {"unpack": None, "group": None}),
        (errbar.Posterior.forget, {"unpack": None, "group": None}),
        (errbar.fuse, {"raw": False}),
        (errbar.fuse_frames, {"raw": False}),
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
        errbar.metrics.reliability(prediction.pmf, y),
    ]


@pytest.mark.parametrize("index", range(8))
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


# ------------------------------------------------------------------------------------------------- the inner shape


def package_of(module: str) -> str:
    return module.split(".")[0]


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(name) for name in MODULES if name} == set(PACKAGES)


def test_packages_import_only_from_those_below_them() -> None:
    upwards = {
        (name, other)
        for name, path in MODULES.items()
        if name
        for other in imports(path)
        if other in MODULES and other and PACKAGES.index(package_of(other)) > PACKAGES.index(package_of(name))
    }
    assert upwards == DOORS


def test_doors_are_inside_functions() -> None:
    for name, other in DOORS:
        at_the_top = ast.parse(MODULES[name].read_text(encoding="utf-8")).body
        modules = {node.module for node in at_the_top if isinstance(node, ast.ImportFrom)}
        assert f"errbar.{other}" not in modules


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {o for o in imports(path) if o in MODULES and (name, o) not in DOORS} for name, path in MODULES.items()
    }
    # The package itself gathers the public names, and every package its own.
    graph = {name: others - {""} for name, others in graph.items() if MODULES[name].name != "__init__.py"}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way, name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_contributing_shows_the_tree_that_is_there() -> None:
    text = (SOURCE.parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("```text\n")[1].split("```")[0]
    shown: dict[str, set[str]] = {}
    package = ""
    for line in tree.splitlines():
        package = line[:18].strip() or package
        if package.endswith("/"):
            shown.setdefault(package[:-1], set()).update(name for name in line[18:].replace(",", " ").split())
    there: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if "." in name and path.name != "__init__.py":
            there.setdefault(package_of(name), set()).add(name.partition(".")[2])
    assert shown == there


def test_only_one_module_calls_torch_linalg() -> None:
    for name, path in MODULES.items():
        uses = [
            node.lineno
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "linalg"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            )
            or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.linalg"))
        ]
        assert not uses or name == "_base.linalg", f"{name}, lines {uses}"


def test_every_module_says_what_it_is_for() -> None:
    for name, path in MODULES.items():
        if path.stat().st_size:
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), name


def test_importing_the_package_needs_no_extra() -> None:
    extras = ["matplotlib", "sklearn", "typer", "rich", "scipy", "pandas", "hypothesis", "beartype", "curvlinops"]
    extras += ["onnx", "onnxruntime", "onnxscript", "fastapi", "uvicorn", "prometheus_client", "PIL"]
    script = f"import sys, errbar; print([name for name in {extras!r} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.strip() == "[]"


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
    texts = [*SOURCE.rglob("*.py"), *SOURCE.parents[1].glob("README.md"), *SOURCE.parents[1].glob("docs/*.md")]
    found = [path.name for path in texts if re.search(r"pip install '?errbar", path.read_text(encoding="utf-8"))]
    assert found == ["errors.py"]  # where the reason is given


def test_importing_the_package_says_nothing_and_changes_no_global_state() -> None:
    script = (
        "import torch; torch.manual_seed(0); a = torch.get_rng_state(), torch.get_default_dtype(), "
        "torch.is_grad_enabled(), torch.get_num_threads(); import errbar; b = torch.get_rng_state(), "
        "torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads(); "
        "assert torch.equal(a[0], b[0]) and a[1:] == b[1:]"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_the_package_is_typed() -> None:
    assert (SOURCE / "py.typed").exists()
