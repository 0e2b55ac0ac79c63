"""Exported graphs say what `predict` says: in ONNX Runtime, and as torch programs without errbar."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import errbar
from errbar._base import linalg
from errbar._base.execution import plain_execution
from errbar._export.chain import Sample, chained
from errbar._export.graph import cholesky, interval_of_draws, interval_ranks
from errbar._export.write import ON_REQUEST, ExportRequest, checked_thresholds, graph_of
from errbar._model.batch import Batch
from networks import perceptron
from places import ROOT

NAMES = ["pmf", "std", "covariance", "logits", "logit_covariance", "risk"]
THRESHOLDS = (0.05, 0.5)
LEVEL = 0.9


def seeded(model: nn.Module, seed: int = 0, scale: float = 1.5) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) / width**0.5)
    return model


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class SmallConvolution(nn.Module):
    """Convolution, batch norm and pooling in front of two linear layers, with functions in place of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(36, 12)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).flatten(1)
        return self.last(self.dropout(F.relu(self.first(x))))


class Keywords(nn.Module):
    """A model that is called with names, and returns an object with .logits, as those of Hugging Face do.

    `scale` has no dimension, and `shifts` two rows whatever the batch size is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, scale: Tensor, tokens: Tensor, mask: Tensor, shifts: Tensor) -> Any:
        pooled = (self.embedding(tokens) * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return type("Output", (), {"logits": self.head(scale * pooled + shifts.sum(0))})()


def by_onnx_runtime(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return {name: torch.as_tensor(value) for name, value in zip(names, found, strict=True)}


def by_torch(path: Path, x: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.export.load(path).module()(x)
    return found


def require_parity(
    found: dict[str, Tensor], posterior: errbar.Posterior, x: Any, *, seed: int, samples: int, tolerance: float = 1e-4
) -> None:
    prediction, logits = posterior.predict(x, samples, seed), posterior.logits(x)
    expected = {
        "pmf": prediction.pmf,
        "std": prediction.std,
        "covariance": prediction.covariance,
        "logits": logits.mean,
        "logit_covariance": logits.covariance,
    }
    if "lower" in found:
        interval = prediction.interval(LEVEL)
        expected |= {"lower": interval[0], "upper": interval[1], "mutual_information": prediction.mutual_information}
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        scale = value.abs().max().clamp_min(1)
        torch.testing.assert_close(found[name] / scale, value / scale, rtol=0, atol=tolerance, msg=name)
    for index, threshold in enumerate(THRESHOLDS):
        # A sample that rounding takes over the threshold counts as 1/K: samples that near may fall on either side.
        high, low = prediction.risk(threshold - 1e-5), prediction.risk(threshold + 1e-5)
        risk = found["risk"][:, index]
        assert bool(((risk >= low - 1e-6) & (risk <= high + 1e-6)).all())


def by_graph(posterior: errbar.Posterior, x: Tensor, **options: Any) -> dict[str, Tensor]:
    """What the module says that files are made of: all of the mathematics in a fraction of the time of a file."""
    found: dict[str, Tensor] = graph_for(posterior, x, **options)(x)
    return found


def graph_for(
    posterior: errbar.Posterior,
    x: Tensor,
    *,
    seed: int = 0,
    samples: int = 50,
    thresholds: Tensor | None = None,
    draws: str = "random",
) -> Any:
    task = posterior.information.task
    limits = torch.tensor(THRESHOLDS)[:, None].expand(-1, task.n_classes) if thresholds is None else thresholds
    request = ExportRequest(
        posterior.calibration,
        samples,
        seed,
        draws,
        limits.to(task.network.dtype),
        (*NAMES, *ON_REQUEST),
        LEVEL,
        posterior.label_factors,
    )
    with plain_execution(task.network.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch deprecates inside itself, as in `export`
        return graph_of(task, posterior.factor, Batch((x[:2],)), request)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "two layers": (lambda: perceptron(6, 14, 9, 4), (6,), {"last_layers": 2}),
    "three layers, eta": (
        lambda: perceptron(6, 7, 5, 4, activation=nn.Tanh),
        (6,),
        {"last_layers": 3, "fisher": "eta"},
    ),
    "convolutions": (SmallConvolution, (1, 8, 8), {"last_layers": 2}),
    "hundred classes": (lambda: perceptron(6, 8, 100), (6,), {"last_layers": 1, "fisher": "eta"}),
    "last layer, ggn": (lambda: perceptron(6, 8, 5), (6,), {"last_layers": 1}),
    "wide last layer": (lambda: perceptron(6, 70, 3), (6,), {"last_layers": 1}),
    "last layer, kron": (lambda: perceptron(6, 8, 5), (6,), {"last_layers": 1, "structure": "kron"}),
    "last layer, diag": (lambda: perceptron(6, 8, 5), (6,), {"last_layers": 1, "structure": "diag"}),
    "two layers, kron": (lambda: perceptron(6, 8, 7, 5), (6,), {"last_layers": 2, "structure": "kron"}),
    "two layers, diag": (lambda: perceptron(6, 8, 7, 5), (6,), {"last_layers": 2, "structure": "diag"}),
    "two layers, block": (lambda: perceptron(6, 8, 7, 5), (6,), {"last_layers": 2, "structure": "block"}),
    "one logit": (lambda: perceptron(6, 8, 1), (6,), {"last_layers": 2}),
    "one logit, eta": (lambda: perceptron(6, 8, 1), (6,), {"last_layers": 1, "fisher": "eta"}),
    "one logit, kron": (lambda: perceptron(6, 8, 1), (6,), {"last_layers": 1, "structure": "kron"}),
    "one logit, diag": (lambda: perceptron(6, 8, 1), (6,), {"last_layers": 1, "structure": "diag"}),
    "two classes": (lambda: perceptron(6, 8, 2), (6,), {"last_layers": 2}),
    "no biases": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        (6,),
        {"last_layers": 2},
    ),
    "no biases, kron": (
        lambda: nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)),
        (6,),
        {"last_layers": 2, "structure": "kron"},
    ),
    "biases alone, kron": (
        lambda: perceptron(6, 8, 3),
        (6,),
        {"parameters": ["0.bias", "2.bias"], "structure": "kron"},
    ),
    "a weight without its bias": (lambda: perceptron(6, 8, 5), (6,), {"parameters": ["0.weight", "2.bias"]}),
}


def fitted(case: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[errbar.Posterior, tuple[int, ...]]:
    make, shape, options = CASES[case]
    model = seeded(make(), seed).to(dtype)
    x = normal(80, *shape, seed=seed + 1, dtype=dtype)
    posterior = errbar.fit(model, [x], prior=errbar.Prior(2.0), **options)
    return posterior.with_calibration(temperature=1.3, covariance_scale=0.6), shape


@pytest.mark.parametrize("case", CASES)
def test_the_graph_in_float64_says_what_predict_says_for_every_batch_size(case: str) -> None:
    posterior, shape = fitted(case, 5, torch.float64)
    for size in (1, 7):
        x = normal(size, *shape, seed=size, dtype=torch.float64)
        require_parity(by_graph(posterior, x, seed=3), posterior, x, seed=3, samples=50, tolerance=1e-8)


@pytest.mark.parametrize("last_layers", [2, 3])
def test_what_is_as_the_prior_has_it_is_left_out_of_the_products(last_layers: int) -> None:
    """ReLUs that no training input passes have no coefficients with others; another input may pass them."""
    model = seeded(perceptron(6, 14, 9, 4)).double()
    with torch.no_grad():
        model[0].bias[[1, 5, 6]] = -30
        model[2].bias[[0, 4]] = -30
    posterior = errbar.fit(model, [normal(80, 6, dtype=torch.float64)], last_layers=last_layers)
    far = 40 * normal(7, 6, seed=2, dtype=torch.float64)
    passed = model[:2](far) > 0, model[:4](far) > 0
    assert bool(passed[0][:, [1, 5, 6]].any())
    assert bool(passed[1][:, [0, 4]].any())
    for x in (far, far / 40):
        require_parity(by_graph(posterior, x), posterior, x, seed=0, samples=50, tolerance=1e-8)
    if last_layers == 2:
        buffers = graph_for(posterior, x).gaussian.covariance.named_buffers()
        sizes = {name: tuple(buffer.shape) for name, buffer in buffers if name.startswith("coefficients")}
        # 12 of 14 + 1 inputs and 7 of 9 outputs of the last but one layer, 8 of 9 + 1 inputs of the last.
        assert sizes == {
            "coefficients_0_0": (8 * 5 + 2, 4 * 3),
            "coefficients_1_1": (12 * 7 + 3, 7 * 4 + 2),
            "coefficients_0_1": (8 * 12, 4 * 7),
        }


@pytest.mark.parametrize("case", CASES)
def test_the_graph_softens_as_predict_does(case: str) -> None:
    posterior, shape = fitted(case, 5, torch.float64)
    x = normal(7, *shape, seed=7, dtype=torch.float64)
    softened = posterior.with_calibration(softening=4.0)
    found = by_graph(softened, x, seed=3)
    require_parity(found, softened, x, seed=3, samples=50, tolerance=1e-8)
    # T(x) = T √(1 + c v̄(x)), from the plain logits.
    plain = posterior.uncalibrated().logits(x)
    classes = plain.mean.shape[1]
    centring = torch.eye(classes, dtype=torch.float64) - 1 / classes
    variance = torch.einsum("mn,bnm->b", centring, plain.covariance) / (classes - 1)
    torch.testing.assert_close(found["logits"], plain.mean / (1.3 * (1 + 4 * variance).sqrt())[:, None])


@pytest.mark.parametrize(
    ("ending", "case", "dtype"),
    [
        ("onnx", "two layers", torch.float64),
        ("onnx", "last layer, kron", torch.float32),
        ("onnx", "one logit, eta", torch.float64),
        ("pt2", "two layers", torch.float32),
        ("pt2", "last layer, kron", torch.float64),
    ],
)
def test_files_soften_as_predict_does(ending: str, case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    posterior, shape = fitted(case, 2, dtype)
    softened = posterior.with_calibration(softening=4.1)
    path = tmp_path / f"posterior.{ending}"
    softened.export(path, example=normal(3, *shape, dtype=dtype), samples=60, seed=4, risk=THRESHOLDS)
    x = normal(7, *shape, seed=7, dtype=dtype)
    found = by_onnx_runtime(path, x=x) if ending == "onnx" else by_torch(path, x)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-8
    require_parity(found, softened, x, seed=4, samples=60, tolerance=tolerance)


def fitted_labels(case: str, dtype: torch.dtype) -> tuple[errbar.Posterior, tuple[int, ...]]:
    make, shape, options = CASES[case]
    model, x = seeded(make(), 5).to(dtype), normal(80, *shape, seed=6, dtype=dtype)
    options = {name: value for name, value in options.items() if name != "fisher"}
    posterior = errbar.fit(model, [x], prior=errbar.Prior(2.0), outputs="labels", **options)
    return posterior.with_calibration(temperature=1.3, covariance_scale=0.6), shape


FORMS = ("two layers", "last layer, ggn", "last layer, kron", "last layer, diag", "two layers, kron", "one logit")


@pytest.mark.parametrize("calibration", ["together", "each", "softened", "softened each"])
@pytest.mark.parametrize("case", FORMS)
def test_the_graph_of_several_labels_says_what_predict_says(case: str, calibration: str) -> None:
    posterior, shape = fitted_labels(case, torch.float64)
    if "each" in calibration:
        labels = range(posterior.information.n_classes)
        posterior = posterior.with_label_factors(tuple((1 + 0.3 * label, 2 / (1 + label)) for label in labels))
    if "softened" in calibration:
        posterior = posterior.with_calibration(softening=4.0)
    x = normal(7, *shape, seed=7, dtype=torch.float64)
    require_parity(by_graph(posterior, x, seed=3), posterior, x, seed=3, samples=50, tolerance=1e-8)


def test_a_file_of_several_labels(tmp_path: Path) -> None:
    posterior, shape = fitted_labels("last layer, ggn", torch.float32)
    posterior = posterior.with_label_factors(((1.2, 0.5),) * 5)
    path, x = tmp_path / "posterior.onnx", normal(7, *shape, seed=7)
    names = (*NAMES, *ON_REQUEST)
    posterior.export(path, example=x[:3], samples=60, seed=4, risk=THRESHOLDS, outputs=names, level=LEVEL)
    found = by_onnx_runtime(path, x=x)
    assert found["mutual_information"].shape == (7, 5)
    require_parity(found, posterior, x, seed=4, samples=60)
    about = described(path)
    assert json.loads(about["errbar.logits_of"]) == "labels"
    assert json.loads(about["errbar.label_factors"]) == [[1.2, 0.5]] * 5


# A file takes seconds, most of them inside torch: the graphs of all cases are compared above, and files of some here.
IN_ONNX = ("convolutions", "hundred classes")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_ONNX else pytest.mark.slow) for case in CASES]
)
def test_onnx_runtime_says_what_predict_says_for_every_batch_size(case: str, tmp_path: Path) -> None:
    seed = list(CASES).index(case)
    posterior, shape = fitted(case, seed)
    path = tmp_path / "posterior.onnx"
    posterior.export(path, example=normal(3, *shape), samples=200, seed=seed, risk=THRESHOLDS)
    for size in (1, 7, 64):
        x = normal(size, *shape, seed=size)
        found = by_onnx_runtime(path, x=x)
        assert list(found) == NAMES
        require_parity(found, posterior, x, seed=seed, samples=200)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_torch_program_in_float64_says_what_predict_says(case: str, tmp_path: Path) -> None:
    posterior, shape = fitted(case, 5, torch.float64)
    path = tmp_path / "posterior.pt2"
    posterior.export(path, example=normal(1, *shape), samples=50, seed=3, risk=THRESHOLDS)
    for size in (1, 7):
        x = normal(size, *shape, seed=size, dtype=torch.float64)
        require_parity(by_torch(path, x), posterior, x, seed=3, samples=50, tolerance=1e-8)


@dataclass(frozen=True, eq=False)
class Files:
    """One posterior in both formats, for all tests that look at files and not at a case."""

    posterior: errbar.Posterior
    folder: Path
    example: Tensor

    def __call__(self, ending: str) -> Path:
        return self.folder / f"posterior.{ending}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    posterior, shape = fitted("two layers", 0)
    made = Files(posterior, tmp_path_factory.mktemp("files"), normal(3, *shape, seed=99))
    for ending in ("onnx", "pt2"):
        posterior.export(made(ending), example=made.example, samples=100, seed=9, risk=THRESHOLDS)
    return made


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_files_say_what_predict_says(files: Files, ending: str, size: int) -> None:
    x = normal(size, 6, seed=size)
    found = by_onnx_runtime(files("onnx"), x=x) if ending == "onnx" else by_torch(files("pt2"), x)
    assert list(found) == NAMES
    require_parity(found, files.posterior, x, seed=9, samples=100)


@pytest.mark.slow
def test_the_head_of_the_paper_in_onnx_runtime(tmp_path: Path) -> None:
    model = seeded(perceptron(64, 100, 40, 10))
    posterior = errbar.fit(model, [normal(2000, 64)], last_layers=2, prior=errbar.Prior(6.0))
    assert posterior.information.n_parameters == 4450
    posterior = posterior.with_calibration(temperature=0.8, covariance_scale=1.7)
    path = tmp_path / "posterior.onnx"
    posterior.export(path, example=normal(2, 64), seed=11, risk=THRESHOLDS)
    for size in (1, 7, 64):
        x = normal(size, 64, seed=size)
        require_parity(by_onnx_runtime(path, x=x), posterior, x, seed=11, samples=1000)


def test_intervals_and_mutual_information_come_where_they_are_named(tmp_path: Path) -> None:
    posterior, shape = fitted("last layer, kron", 1)
    path = tmp_path / "posterior.onnx"
    names = ("mutual_information", "upper", "lower", "pmf")
    posterior.export(path, example=normal(3, *shape), samples=200, outputs=names, level=0.8)
    x = normal(20, *shape, seed=2)
    found, prediction = by_onnx_runtime(path, x=x), posterior.predict(x, 200)
    assert list(found) == ["pmf", "lower", "upper", "mutual_information"]
    for name, value in zip(("lower", "upper"), prediction.interval(0.8), strict=True):
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    # Relative too: scores are compared on a logarithmic grid.
    torch.testing.assert_close(found["mutual_information"], prediction.mutual_information, rtol=1e-4, atol=1e-9)
    assert json.loads(described(path)["errbar.level"]) == 0.8
    with pytest.raises(errbar.ArgumentError, match=r"The level of the interval is 1; expected a number between"):
        posterior.export(path, example=x, outputs=names, level=1)


@pytest.mark.parametrize(("count", "level"), [(1, 0.5), (2, 0.9), (3, 0.5), (41, 0.95), (100, 0.01)])
def test_an_interval_from_the_ends_is_that_from_all_samples(count: int, level: float) -> None:
    samples = torch.rand(2, 3, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pmf = samples.mean(2)
    pmf[0, 1] = torch.nan
    ranks = interval_ranks(level, count, samples.dtype)
    for found, share in zip(interval_of_draws(samples, pmf, ranks), ((1 - level) / 2, (1 + level) / 2), strict=True):
        expected = torch.quantile(samples, share, dim=2)
        expected[0, 1] = torch.nan
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, equal_nan=True)


def described(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


# ------------------------------------------------------------------------------------------------- the derivative


class Between(nn.Module):
    """Linear layers with functions between them, and another one behind them."""

    def __init__(
        self, between: Sequence[Callable[[Tensor], Tensor]], behind: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(5, 5) for _ in between)
        self.last = nn.Linear(5, 3)
        self.between, self.behind = between, behind

    def forward(self, x: Tensor) -> Tensor:
        for layer, function in zip(self.first, self.between, strict=True):
            x = function(layer(x))
        logits: Tensor = self.last(x)
        return logits if self.behind is None else self.behind(logits)


DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu in place": lambda z: F.relu(z, inplace=True),
    "leaky relu": F.leaky_relu,
    "leaky relu, slope": lambda z: F.leaky_relu(z, 0.3, inplace=True),
    "elu": lambda z: F.elu(z, alpha=0.7),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu by tanh": lambda z: F.gelu(z, approximate="tanh"),
    "softplus": lambda z: F.softplus(z, beta=2.0),
    "softplus, linear from 0.3 on": lambda z: F.softplus(z, beta=1.5, threshold=0.3),
    "hardtanh": lambda z: F.hardtanh(z, -0.4, 0.6),
    "relu6": F.relu6,
    "dropout": lambda z: F.dropout(z, 0.5, training=False),
    "flatten": lambda z: torch.flatten(z, 1),
    "numbers": lambda z: -(2 * z / 3 - 1) + 0.5,
    "nothing": lambda z: z,
}


# Three functions in one network, because most of the time is that of making a graph at all.
GROUPS = [tuple(DIFFERENTIABLE)[start : start + 3] for start in range(0, len(DIFFERENTIABLE), 3)]


def require_derivatives(model: nn.Module, **selected: Any) -> None:
    """V ⊗ hᵀ of the chain against the Jacobian of the whole model by automatic differentiation."""
    x = normal(9, 5, dtype=torch.float64)
    posterior = errbar.fit(model, [x], **selected)
    task = posterior.information.task
    layers = task.route.layers
    chain = chained(task.network, layers, Sample.of(Batch((x,))))
    output, values = chain(x)
    torch.testing.assert_close(output, model(x))
    terms = chain.terms(values, None, torch.float64)
    assert sorted(term.layer.name for term in terms) == sorted(layer.name for layer in layers)
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    truth = torch.func.jacrev(lambda values: torch.func.functional_call(model, values, (x,)))(parameters)
    for term in terms:
        name = term.layer.name
        outer = torch.eye(term.layer.outputs).double() if term.outer is None else term.outer
        made = outer[..., None] * term.inner[:, None, None, :]
        expected = torch.cat([truth[f"{name}.weight"], truth[f"{name}.bias"][..., None]], -1)
        assert float(expected.abs().amax((0, 2, 3)).min()) > 1e-3
        torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("names", GROUPS, ids="; ".join)
def test_the_derivative_of_every_function_between_layers_is_written_out(names: tuple[str, ...]) -> None:
    model = seeded(Between([DIFFERENTIABLE[name] for name in names])).double()
    require_derivatives(model, last_layers=len(names) + 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_between_selected_ones_need_not_be_selected() -> None:
    require_derivatives(seeded(perceptron(5, 6, 4, 3, activation=nn.Tanh)).double(), parameters=["0", "4"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
@pytest.mark.parametrize("last_layers", [1, 2])
def test_logits_that_are_changed_after_the_last_layer(last_layers: int, fisher: str) -> None:
    model = seeded(Between([F.relu], lambda g: 10 * torch.tanh(g / 10))).double()
    require_derivatives(model, last_layers=last_layers)
    x = normal(40, 5, dtype=torch.float64)
    posterior = errbar.fit(model, [x], last_layers=last_layers, fisher=fisher)
    require_parity(by_graph(posterior, x), posterior, x, seed=0, samples=50, tolerance=1e-8)


# ------------------------------------------------------------------------------------------------ the square root


def covariances(*, rank: int, size: int = 6, count: int = 20) -> Tensor:
    root = normal(count, size, rank, dtype=torch.float64)
    return root @ root.mT


SHARES = [0.0, *linalg.jitters(1e-9)]


def test_the_written_out_factor_is_the_one_of_the_library() -> None:
    matrix = covariances(rank=9)
    expected, jitter = linalg.safe_cholesky(matrix, name="it", limit=1e-9)
    assert jitter == 0
    torch.testing.assert_close(cholesky(matrix, SHARES), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(cholesky(matrix[:, :1, :1], SHARES), matrix[:, :1, :1].sqrt())


def test_a_singular_covariance_gets_the_least_jitter_that_helps() -> None:
    matrix = covariances(rank=3)
    lower = cholesky(matrix, SHARES)
    scale = matrix.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    torch.testing.assert_close(lower @ lower.mT / scale, matrix / scale, rtol=0, atol=1e-9)


def test_a_certain_quantity_has_the_root_zero() -> None:
    matrix = covariances(rank=9)
    matrix[3] = 0
    lower = cholesky(matrix, SHARES)
    assert bool((lower[3] == 0).all())
    assert bool((lower[[0, 1, 2, 4]].diagonal(dim1=1, dim2=2) > 0).all())


def test_what_is_no_covariance_becomes_nan_and_never_certainty() -> None:
    matrix = covariances(rank=9)
    matrix[2] -= 3 * torch.eye(6) * matrix[2].trace()
    matrix[5, 0, 0] = torch.nan
    lower = cholesky(matrix, SHARES)
    assert bool(lower[[2, 5]].isnan().all())
    assert bool(lower[[0, 1, 3, 4]].isfinite().all())


def test_without_parameter_uncertainty_the_graph_is_temperature_scaling() -> None:
    posterior, shape = fitted("two layers", 0)
    posterior = posterior.with_calibration(covariance_scale=0.0)
    x = normal(4, *shape)
    found = by_graph(posterior, x)
    torch.testing.assert_close(found["pmf"], torch.softmax(posterior.model(x).detach() / 1.3, 1))
    assert float(found["std"].max()) < 1e-6


def test_the_graph_adds_draws_without_losing_digits(tmp_path: Path) -> None:
    """Equal samples are the worst case: what rounding takes from a sum, it takes every time."""
    posterior, shape = fitted("two layers", 0)
    x = normal(4, *shape)
    path = tmp_path / "graph.onnx"
    posterior.with_calibration(covariance_scale=0.0).export(path, example=x[:1], samples=20_000)
    expected = torch.softmax(posterior.model(x).detach() / 1.3, 1)
    found = by_onnx_runtime(path, x=x)["pmf"]
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-7)


def test_logits_with_a_singular_covariance_are_exported_too() -> None:
    """Two hidden units and six classes: P^g of the first layer alone has rank two."""
    model = seeded(perceptron(4, 2, 6)).double()
    x = normal(40, 4, dtype=torch.float64)
    posterior = errbar.fit(model, [x], parameters=["0"])
    assert posterior.predict(x).jitter > 0
    # Which of two jitters is the first that helps is a matter of rounding: √1e-12 is what it may change.
    require_parity(by_graph(posterior, x), posterior, x, seed=0, samples=50, tolerance=1e-5)


# ------------------------------------------------------------------------------------------------------- the file


def test_a_torch_program_runs_where_errbar_is_not(files: Files, tmp_path: Path) -> None:
    x = normal(7, 6)
    torch.save(x, tmp_path / "x.pt")
    (tmp_path / "posterior.pt2").write_bytes(files("pt2").read_bytes())
    script = (
        "import sys; sys.modules['errbar'] = None\n"
        "import torch; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "program = torch.export.load(folder / 'posterior.pt2').module()\n"
        "torch.save(program(torch.load(folder / 'x.pt')), folder / 'found.pt')\n"
        "assert not [name for name in sys.modules if name.startswith('errbar.')]\n"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    require_parity(torch.load(tmp_path / "found.pt"), files.posterior, x, seed=9, samples=100)


@pytest.mark.parametrize("ending", ["onnx", pytest.param("pt2", marks=pytest.mark.slow)])
def test_a_model_that_is_called_with_names(ending: str, tmp_path: Path) -> None:
    model = seeded(Keywords())
    tokens = torch.randint(0, 11, (40, 4), generator=torch.Generator().manual_seed(0))
    inputs = {
        "scale": torch.tensor(0.7),
        "tokens": tokens,
        "mask": (tokens > 2).float() + 0.1,
        "shifts": normal(2, 6, seed=3),
    }
    posterior = errbar.fit(model, [inputs], last_layers=1, fisher="eta")
    example = inputs | {name: inputs[name][:3] for name in ("tokens", "mask")}
    path = tmp_path / f"posterior.{ending}"
    posterior.export(path, example=example, samples=50, risk=THRESHOLDS)
    found = by_onnx_runtime(path, **inputs) if ending == "onnx" else torch.export.load(path).module()(**inputs)
    require_parity(found, posterior, inputs, seed=0, samples=50)


@pytest.mark.parametrize("case", ["two layers", "last layer, kron", "last layer, diag"])
@pytest.mark.parametrize("draws", ["antithetic", "sobol"])
def test_other_draws(draws: str, case: str) -> None:
    posterior, shape = fitted(case, 0)
    x = normal(4, *shape)
    found = by_graph(posterior, x, samples=65, seed=2, draws=draws)
    torch.testing.assert_close(found["pmf"], posterior.predict(x, 65, 2, draws=draws).pmf, rtol=0, atol=1e-5)
    assert float((found["pmf"] - posterior.predict(x, 65, 2).pmf).abs().max()) > 1e-3


def test_draws_and_outputs_that_are_asked_for_are_in_the_file(tmp_path: Path) -> None:
    posterior, shape = fitted("last layer, diag", 0)
    path, x = tmp_path / "posterior.pt2", normal(4, *shape)
    posterior.export(path, example=x, samples=64, seed=2, draws="sobol", outputs=["pmf"])
    found = by_torch(path, x)
    assert list(found) == ["pmf"]
    torch.testing.assert_close(found["pmf"], posterior.predict(x, 64, 2, draws="sobol").pmf, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_input_that_is_not_a_number_has_no_pmf_and_no_risk(files: Files, ending: str) -> None:
    x = normal(4, 6)
    x[1, 0] = torch.nan
    found = by_onnx_runtime(files("onnx"), x=x) if ending == "onnx" else by_torch(files("pt2"), x)
    for name in NAMES:
        assert bool(found[name][1].isnan().all()), name
        assert bool(found[name][[0, 2, 3]].isfinite().all()), name


def test_thresholds_for_each_class() -> None:
    posterior, shape = fitted("two layers", 0)
    x, limits = normal(6, *shape), torch.tensor([0.1, 0.2, 0.3, 0.4])
    both = checked_thresholds([limits, 0.15], posterior.predict(x, 10))
    found, prediction = by_graph(posterior, x, samples=100, thresholds=both)["risk"], posterior.predict(x, 100)
    assert found.shape == (6, 2, 4)
    # One sample of the hundred may fall on the other side by rounding.
    torch.testing.assert_close(found[:, 0], prediction.risk(limits), rtol=0, atol=0.011)
    torch.testing.assert_close(found[:, 1], prediction.risk(0.15), rtol=0, atol=0.011)
    assert float((found[:, 0] - found[:, 1]).abs().max()) > 0.05


def test_a_file_says_what_it_is(files: Files) -> None:
    model = onnx.load(files("onnx"))
    about = {entry.key: json.loads(entry.value) for entry in model.metadata_props if entry.key.startswith("errbar")}
    assert about["errbar"] == errbar.__version__
    assert (about["errbar.temperature"], about["errbar.covariance_scale"]) == (1.3, 0.6)
    assert (about["errbar.samples"], about["errbar.seed"], about["errbar.outputs"]) == (100, 9, NAMES)
    assert about["errbar.parameters"] == list(files.posterior.information.parameter_names)
    kept = {"temperature.json": "", "weights.json": ""}
    torch.export.load(files("pt2"), extra_files=kept)
    assert json.loads(kept["temperature.json"]) == 1.3
    assert json.loads(kept["weights.json"]) == about["errbar.weights"]


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_file_holds_neither_the_example_nor_where_it_was_made(files: Files, ending: str) -> None:
    content = files(ending).read_bytes()
    assert files.example.numpy().tobytes() not in content
    assert files.example[0].numpy().tobytes() not in content
    for place in (Path(errbar.__file__).parent, ROOT, files.folder):
        assert str(place).encode() not in content


def test_the_inputs_of_a_file_have_a_free_batch_size_and_names(files: Files) -> None:
    session = onnxruntime.InferenceSession(str(files("onnx")), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert given.name == "x"
    assert given.shape[0] == "batch"
    assert given.shape[1:] == [6]
    assert session.get_outputs()[2].shape == ["batch", 4, 4]
    with pytest.raises(Exception, match="Got: 5 Expected: 6"):
        session.run(None, {"x": np.zeros((2, 5), dtype=np.float32)})


def test_the_model_is_not_touched(tmp_path: Path) -> None:
    make, shape, options = CASES["convolutions"]
    model = seeded(make()).train()
    posterior = errbar.fit(model, [normal(40, *shape)], **options | {"last_layers": 1, "fisher": "eta"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    posterior.export(tmp_path / "posterior.pt2", example=normal(2, *shape), samples=20)
    assert all(part.training and not part._forward_hooks for part in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    posterior.predict(normal(2, *shape), samples=20)


def test_after_an_update_the_new_covariance_is_exported() -> None:
    posterior, shape = fitted("two layers", 0)
    posterior.covariance()
    updated = posterior.update([normal(3, *shape, seed=8)])
    x = normal(4, *shape)
    require_parity(by_graph(updated, x), updated, x, seed=0, samples=50)


# -------------------------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def simple() -> errbar.Posterior:
    return fitted("last layer, ggn", 0)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"risk": 1.5}, "The risk threshold is 1.5; expected a probability"),
        ({"risk": [0.1, torch.zeros(3)]}, "expected a probability, or one for each of the 5 classes"),
        ({"outputs": ["pmf", "mean"]}, r"outputs is \['pmf', 'mean'\]; expected one or more of pmf, std"),
        ({"outputs": []}, r"outputs is \[\]; expected one or more"),
        ({"outputs": "risk"}, "outputs has 'risk', but there is no threshold for it"),
        ({"samples": 0}, "samples is 0; expected a whole number of one or more"),
        ({"seed": -1}, "seed is -1; expected a whole number"),
        ({"draws": "latin"}, "draws is 'latin'; expected 'random', 'antithetic' or 'sobol'"),
    ],
)
def test_arguments_that_cannot_be_used(
    simple: errbar.Posterior, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "posterior.pt2"
    with pytest.raises(errbar.ArgumentError, match=message):
        simple.export(path, example=normal(2, 6), **options)
    assert not path.exists()


def test_a_name_that_says_nothing_about_the_format(simple: errbar.Posterior, tmp_path: Path) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"expected a name that ends in \.onnx or \.pt2"):
        simple.export(tmp_path / "posterior.pt", example=normal(2, 6))


def test_a_folder_that_is_not_there(simple: errbar.Posterior, tmp_path: Path) -> None:
    with pytest.raises(errbar.FileError, match=r"expected a folder .* that exists"):
        simple.export(tmp_path / "nowhere" / "posterior.pt2", example=normal(2, 6))


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_a_pipe_in_place_of_a_file(simple: errbar.Posterior, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"posterior.{ending}"
    os.mkfifo(path)
    with pytest.raises(errbar.FileError, match=r"posterior\.\w+: it is a pipe"):
        simple.export(path, example=normal(2, 6))
    assert path.is_fifo()


@pytest.mark.parametrize("missing", ["onnx", "onnxscript"])
def test_onnx_files_need_an_extra(
    simple: errbar.Posterior, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(errbar.MissingExtraError, match=rf"needs {missing}, .*pip install '\.\[export\]'"):
        simple.export(tmp_path / "posterior.onnx", example=normal(2, 6))


class Unfollowable(nn.Module):
    """Two linear layers with what cannot be followed back between them."""

    def __init__(self, forward: Callable[[Tensor, nn.Module, nn.Module], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(x, self.first, self.last)


@pytest.mark.parametrize(
    ("way", "operation"),
    [
        (lambda x, first, last: last(torch.softmax(first(x), 1)), "aten.softmax"),
        (lambda x, first, last: last(x + first(x)), "aten.add.Tensor"),
        (lambda x, first, last: last(F.layer_norm(first(x), (6,))), "aten.layer_norm"),
        (lambda x, first, last: last(first(x)[:, [1, 0, 2, 3, 4, 5]]), "aten.index"),
    ],
)
def test_what_cannot_be_followed_back_is_named(
    way: Callable[[Tensor, nn.Module, nn.Module], Tensor], operation: str, tmp_path: Path
) -> None:
    model = seeded(Unfollowable(way))
    posterior = errbar.fit(model, [normal(30, 6)], parameters=["first", "last"])
    with pytest.raises(errbar.ExportError, match=rf"selected layers \('first'\) the model has {operation}"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 6))
    alone, x = errbar.fit(model, [normal(30, 6)], parameters=["last"]), normal(4, 6)
    require_parity(by_graph(alone, x), alone, x, seed=0, samples=50)


@pytest.mark.parametrize(
    ("make", "shape", "options"),
    [
        (lambda: perceptron(6, 8, 3), (6,), {"last_layers": 2, "structure": "lowrank", "rank": 5}),
        (SmallConvolution, (1, 8, 8), {"last_layers": 4}),
        (SmallConvolution, (1, 8, 8), {"last_layers": 4, "structure": "kron"}),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)), (6,), {"last_layers": 2}),
        (lambda: Unfollowable(lambda x, first, last: last(first(torch.relu(first(x))))), (6,), {"last_layers": 2}),
        (lambda: Unfollowable(lambda x, first, last: last(first(x) + first.weight.sum())), (6,), {"last_layers": 2}),
    ],
)
def test_structures_and_layers_without_a_graph(
    make: Callable[[], nn.Module], shape: tuple[int, ...], options: dict[str, Any], tmp_path: Path
) -> None:
    posterior = errbar.fit(seeded(make()), [normal(30, *shape)], **options)
    with pytest.raises(errbar.ExportError, match=r"which an exported graph cannot differentiate by.*last_layers=1"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, *shape))


def test_a_layer_that_is_applied_to_tokens(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)))
    posterior = errbar.fit(model, [normal(30, 2, 5)], last_layers=2)
    with pytest.raises(errbar.ExportError, match=r"selected layers \('0'\) the model has aten\.view"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 2, 5))


def test_operations_that_onnx_runtime_has_not_in_float64(tmp_path: Path) -> None:
    model = seeded(perceptron(6, 8, 3, activation=nn.GELU)).double()
    posterior = errbar.fit(model, [normal(30, 6)], last_layers=1, fisher="eta")
    with pytest.raises(errbar.ExportError, match=r"ONNX Runtime cannot run the graph.*Erf.*expected a float32 model"):
        posterior.export(tmp_path / "posterior.onnx", example=normal(2, 6), samples=10)
    assert not (tmp_path / "posterior.onnx").exists()


class Numbers(nn.Module):
    """Functions with numbers that float32 has not: before the selected layers, between, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.where(x > 0.1, torch.add(x, x.sin(), alpha=0.3), 0.7).masked_fill(x < -1.1, 0.3)
        x = F.elu(torch.sub(x, x.cos(), alpha=0.1).clamp(-0.9, 1.3), 0.7) + torch.full((6,), 0.1, dtype=x.dtype)
        x = F.hardtanh(F.leaky_relu(self.first(x), 0.3) * 1.7, -0.7, 3.3)
        return self.last(x) / 0.3


@pytest.mark.parametrize("structure", ["dense", "kron"])
def test_numbers_stay_float64_in_onnx_files_of_float64_models(structure: str, tmp_path: Path) -> None:
    """T = 1.4 is 1.39999998 in float32; what is left is the order of sums."""
    model = seeded(Numbers()).double()
    posterior = errbar.fit(model, [normal(40, 6)], last_layers=2, structure=structure, prior=errbar.Prior(2.0))
    posterior = posterior.with_calibration(temperature=1.4, covariance_scale=0.3)
    posterior.export(tmp_path / "posterior.onnx", example=normal(3, 6), samples=30, seed=4, risk=THRESHOLDS)
    x = normal(5, 6, seed=8, dtype=torch.float64)
    found = by_onnx_runtime(tmp_path / "posterior.onnx", x=x)
    require_parity(found, posterior, x, seed=4, samples=30, tolerance=1e-13)


# ONNX Runtime has no convolutions in float64.
@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != "convolutions"])
def test_onnx_files_of_float64_models_say_what_predict_says(case: str, tmp_path: Path) -> None:
    posterior, shape = fitted(case, 5, torch.float64)
    posterior = posterior.with_calibration(temperature=1.4, covariance_scale=0.3)
    posterior.export(tmp_path / "posterior.onnx", example=normal(3, *shape), samples=30, seed=4, risk=THRESHOLDS)
    x = normal(5, *shape, seed=8, dtype=torch.float64)
    found = by_onnx_runtime(tmp_path / "posterior.onnx", x=x)
    require_parity(found, posterior, x, seed=4, samples=30, tolerance=1e-12)


def test_numbers_that_onnx_has_in_float32_only(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(6, 8), nn.CELU(0.7), nn.Linear(8, 3)), scale=3.0).double()
    posterior = errbar.fit(model, [normal(30, 6)], last_layers=1, fisher="eta")
    with pytest.raises(errbar.ExportError, match=r"ONNX Runtime and .* differ by .*numbers in float32 only: a \.pt2"):
        posterior.export(tmp_path / "posterior.onnx", example=normal(20, 6), samples=10)
    posterior.export(tmp_path / "posterior.pt2", example=normal(20, 6), samples=10)


def test_half_precision(tmp_path: Path) -> None:
    posterior = errbar.fit(seeded(perceptron(6, 8, 3)).bfloat16(), [normal(30, 6)], last_layers=1)
    with pytest.raises(errbar.ExportError, match=r"are torch\.bfloat16; expected all of them float32"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 6))


def test_more_classes_than_a_graph_can_factorise(tmp_path: Path) -> None:
    posterior = errbar.fit(seeded(perceptron(6, 2, 130)), [normal(30, 6)], last_layers=1)
    with pytest.raises(errbar.ExportError, match=r"With 130 classes .* expected at most 128.*fisher='eta'"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 6), samples=10)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1.0
        return self.last(x)


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x if float(x.sum()) > 0 else 2 * x)


class Alone(nn.Module):
    """What torch.export cannot see, because it takes it for granted that there are two rows or more."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(2 * x if x.shape[0] == 1 else x)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_model_that_does_something_else_for_one_input(rows: int, tmp_path: Path) -> None:
    posterior = errbar.fit(seeded(Alone()), [normal(30, 6)], last_layers=1, fisher="eta")
    with pytest.raises(errbar.ExportError, match="behaves differently for a batch of one cannot be exported"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(rows, 6), samples=10)


def test_a_model_that_counts_its_calls(tmp_path: Path) -> None:
    posterior = errbar.fit(seeded(Counting()), [normal(30, 6)], last_layers=1)
    with pytest.raises(errbar.ExportError, match="The model changes its buffers or its inputs when it runs"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 6))


def test_a_model_that_decides_by_values(tmp_path: Path) -> None:
    posterior = errbar.fit(seeded(Deciding()), [normal(30, 6)], last_layers=1)
    with pytest.raises(errbar.ExportError, match=r"torch\.export cannot make a graph of the model for any batch size"):
        posterior.export(tmp_path / "posterior.pt2", example=normal(2, 6))


def test_a_graph_that_says_something_else_is_not_written(
    simple: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "posterior.pt2"
    path.write_bytes(b"what was there before")
    monkeypatch.setattr("errbar._export.write.standard_normal", lambda rows, columns, *_: torch.zeros(rows, columns))
    with pytest.raises(errbar.ExportError, match=r"The graph and posterior\.predict differ by .* in 'pmf'"):
        simple.export(path, example=normal(2, 6))
    assert path.read_bytes() == b"what was there before"


def test_weights_that_changed_since_the_fit(simple: errbar.Posterior, tmp_path: Path) -> None:
    with torch.no_grad():
        next(simple.model.parameters()).mul_(2)
    with pytest.raises(errbar.WeightsChangedError, match="weights changed since the fit"):
        simple.export(tmp_path / "posterior.pt2", example=normal(2, 6))
