"""Exported graphs of fused classifiers say what `predict` says: all networks in one file."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._export.graph import positive_inverse
from networks import perceptron

CLASSES = 4
NAMES = ["pmf", "std", "covariance", "logits", "logit_covariance", "risk"]


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def posterior(seed: int, dtype: torch.dtype = torch.float64, inputs: int = 6, **options: Any) -> errbar.Posterior:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = perceptron(inputs, 8, CLASSES, activation=nn.Tanh).to(dtype)
    fitted = errbar.fit(model, [normal(60, inputs, seed=seed, dtype=dtype)], prior=errbar.Prior(2.0), **options)
    return fitted.with_calibration(temperature=1.2, covariance_scale=0.8)


def trio(dtype: torch.dtype = torch.float64) -> list[errbar.Posterior]:
    """A full, a factored and a diagonal P^g, one of them softened."""
    return [
        posterior(0, dtype, last_layers=2),
        posterior(1, dtype, last_layers=1, structure="kron"),
        posterior(2, dtype, last_layers=1, fisher="eta").with_calibration(softening=0.5),
    ]


def by_onnx_runtime(path: Path, **inputs: Tensor) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {name: value.numpy() for name, value in inputs.items()})
    return {name: torch.as_tensor(value) for name, value in zip(names, found, strict=True)}


def require_parity(
    found: dict[str, Tensor], prediction: errbar.Prediction, logits: errbar.LogitGaussian, tolerance: float
) -> None:
    expected = {
        "pmf": prediction.pmf,
        "std": prediction.std,
        "covariance": prediction.covariance,
        "logits": logits.mean,
        "logit_covariance": logits.covariance,
        "risk": torch.stack([prediction.risk(0.05), prediction.risk(0.5)], 1),
    }
    assert list(found) == NAMES
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance * float(value.abs().max().clamp_min(1)))


@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_file_says_what_predict_says_for_every_batch_size(tmp_path: Path, ending: str) -> None:
    fused = errbar.FusedClassifier(
        trio(), scales=(2.0, 0.5, 1.0), discrepancies=(0.3, 0.0, 1.1), temperature=1.4, covariance_scale=0.7
    )
    path = tmp_path / f"fused{ending}"
    fused.export(path, example=normal(5, 6), samples=60, seed=3, risk=(0.05, 0.5))
    for size in (1, 7):
        x = normal(size, 6, seed=size + 9)
        found = by_onnx_runtime(path, x=x) if ending == ".onnx" else torch.export.load(path).module()(x)
        require_parity(found, fused.predict(x, 60, 3), fused.logits(x), 1e-8)
    if ending == ".onnx":
        about = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        assert json.loads(about["errbar.discrepancies"]) == [0.3, 0.0, 1.1]
        assert len(json.loads(about["errbar.networks"])) == 3


@pytest.mark.parametrize(
    ("discrepancies", "q"), [((math.inf,) * 3, 0.0), ((math.inf, 0.4, math.inf), 0.5), ((1e9, 2e9, 3e9), 0.0)]
)
def test_means_of_logits_and_networks_alone_are_exported(
    tmp_path: Path, discrepancies: tuple[float, ...], q: float
) -> None:
    fused = errbar.FusedClassifier(trio(), discrepancies=discrepancies, temperature=0.8, covariance_scale=q)
    path = tmp_path / "fused.pt2"
    fused.export(path, example=normal(4, 6), samples=40, risk=(0.05, 0.5))
    x = normal(3, 6, seed=4)
    require_parity(torch.export.load(path).module()(x), fused.predict(x, 40), fused.logits(x), 1e-8)


def test_networks_in_float32_are_fused_in_float64(tmp_path: Path) -> None:
    fused = errbar.FusedClassifier(trio(torch.float32), discrepancies=(0.3, 0.1, 1.1), temperature=1.4)
    path = tmp_path / "fused.onnx"
    fused.export(path, example=normal(5, 6, dtype=torch.float32), samples=60, risk=(0.05, 0.5))
    x = normal(6, 6, seed=2, dtype=torch.float32)
    prediction = fused.predict(x, 60)
    found = by_onnx_runtime(path, x=x)
    torch.testing.assert_close(found["pmf"], prediction.pmf, rtol=0, atol=1e-5)
    torch.testing.assert_close(found["logit_covariance"], fused.logits(x).covariance, rtol=1e-3, atol=1e-4)


def test_networks_of_two_dtypes_take_the_same_input(tmp_path: Path) -> None:
    fused = errbar.FusedClassifier(
        [posterior(0, torch.float64, last_layers=2), posterior(1, torch.float32, last_layers=2)],
        discrepancies=(0.3, 0.1),
    )
    path = tmp_path / "fused.pt2"
    fused.export(path, example=normal(5, 6), samples=30, outputs=["pmf"])
    x = normal(4, 6, seed=2)
    found = torch.export.load(path).module()(x)
    torch.testing.assert_close(found["pmf"], fused.predict(x, 30).pmf, rtol=0, atol=1e-5)


def test_networks_that_see_different_things_have_inputs_of_their_own(tmp_path: Path) -> None:
    pair = [posterior(0, last_layers=1), posterior(1, inputs=3, last_layers=1)]
    fused = errbar.FusedClassifier(pair, discrepancies=(0.2, 0.4), temperature=1.1)
    path = tmp_path / "fused.onnx"
    fused.export(path, each=[normal(5, 6), normal(5, 3)], samples=50, risk=(0.05, 0.5))
    x = [normal(7, 6, seed=3), normal(7, 3, seed=4)]
    found = by_onnx_runtime(path, network_0_x=x[0], network_1_x=x[1])
    require_parity(found, fused.predict(each=x, samples=50), fused.logits(each=x), 1e-8)


def test_the_inverse_of_the_graph_is_the_inverse() -> None:
    root = normal(5, 7, 7, seed=8)
    matrices = root @ root.mT + 0.1 * torch.eye(7).double()
    torch.testing.assert_close(positive_inverse(matrices), torch.linalg.inv(matrices), rtol=1e-9, atol=1e-9)
    scaled = matrices * torch.tensor([1e-12, 1e-3, 1.0, 1e9, 1e15]).double()[:, None, None]
    torch.testing.assert_close(positive_inverse(scaled) @ scaled, torch.eye(7).double().expand(5, 7, 7))
    indefinite = matrices - 5 * torch.eye(7).double()
    assert bool(positive_inverse(indefinite).isnan().any((1, 2)).all())


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "fused.onnx"
    with_norms = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)).double()
    norms = errbar.fit(with_norms, [normal(40, 6)], parameters="vectors")
    fused = errbar.FusedClassifier([posterior(0, last_layers=1), norms], discrepancies=(1.0, 1.0))
    with pytest.raises(errbar.ExportError, match="cannot differentiate by"):
        fused.export(path, example=normal(4, 6))
    pair = errbar.FusedClassifier([posterior(0, last_layers=1), posterior(1, last_layers=1)])
    with pytest.raises(errbar.ArgumentError, match="Expected x, an input that all networks see"):
        pair.export(path)
    with pytest.raises(errbar.ArgumentError, match=r"ends in \.onnx or \.pt2"):
        pair.export(tmp_path / "fused.bin", example=normal(4, 6))
    with pytest.raises(errbar.ArgumentError, match="there is no threshold"):
        pair.export(path, example=normal(4, 6), outputs=["risk"])
    assert not path.exists()


def test_many_classes_are_refused(tmp_path: Path) -> None:
    x = normal(20, 4)
    wide = [
        errbar.fit(perceptron(4, 5, 130).double(), [x], last_layers=1, structure="diag", prior=errbar.Prior(seed + 1.0))
        for seed in range(2)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = errbar.FusedClassifier(wide, discrepancies=(1.0, 1.0))
        with pytest.raises(errbar.ExportError, match="With 130 classes"):
            fused.export(tmp_path / "fused.onnx", example=x[:2], samples=10)
