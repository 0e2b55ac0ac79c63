"""`logits(x, top=…)`: exactly some rows and columns of `logits(x)`."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import errbar

CLASSES = 7
STRUCTURES = ["dense", "block", "kron", "diag", "lowrank"]


def fitted(structure: str, fisher: str, last_layers: int) -> tuple[errbar.Posterior, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    x = torch.randn(40, 5, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        posterior = errbar.fit(model, [x[:30]], last_layers=last_layers, structure=structure, fisher=fisher)
    return posterior.with_calibration(temperature=1.3, covariance_scale=0.7), x[30:]


@pytest.mark.parametrize("last_layers", [1, 2])
@pytest.mark.parametrize("fisher", ["ggn", "eta", "sampled"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_top_classes_are_rows_and_columns_of_all(structure: str, fisher: str, last_layers: int) -> None:
    posterior, x = fitted(structure, fisher, last_layers)
    whole = posterior.logits(x)
    for top in (2, 4, CLASSES):
        some = posterior.logits(x, top=top)
        assert some.classes is not None
        assert torch.equal(some.classes, whole.mean.argsort(dim=1, descending=True)[:, :top])
        rows = torch.arange(len(x))[:, None]
        torch.testing.assert_close(some.mean, whole.mean[rows, some.classes], rtol=1e-8, atol=1e-10)
        expected = whole.covariance[rows[:, :, None], some.classes[:, :, None], some.classes[:, None, :]]
        torch.testing.assert_close(some.covariance, expected, rtol=1e-8, atol=1e-10)


def test_a_prediction_of_some_classes_is_conditional_on_them() -> None:
    posterior, x = fitted("dense", "ggn", 2)
    certain = posterior.with_calibration(covariance_scale=0.0)
    some = certain.logits(x, top=3)
    assert some.classes is not None
    pmf = certain.predict(x).pmf.gather(1, some.classes)
    torch.testing.assert_close(some.predict().pmf, pmf / pmf.sum(1, keepdim=True))


def test_rows_keep_their_classes_and_fusion_refuses_others() -> None:
    posterior, x = fitted("dense", "ggn", 1)
    some = posterior.logits(x, top=3)
    assert some.classes is not None
    part = some[2:5].tempered(2.0).scaled(0.5).rounded().centered()
    assert part.classes is not None
    assert torch.equal(part.classes, some.classes[2:5])
    fused = errbar.fuse([some, some])
    assert fused.classes is not None
    assert torch.equal(fused.classes, some.classes)
    with pytest.raises(errbar.MismatchError, match="different classes"):
        errbar.fuse([some, posterior.logits(x.flip(0), top=3)])


@pytest.mark.parametrize("top", [0, 1, CLASSES + 1, 2.5, "all"])
def test_top_is_a_number_of_classes(top: object) -> None:
    posterior, x = fitted("dense", "ggn", 1)
    with pytest.raises(errbar.ArgumentError, match=rf"expected a whole number of classes, from 2 to {CLASSES}"):
        posterior.logits(x, top=top)  # type: ignore[arg-type]
