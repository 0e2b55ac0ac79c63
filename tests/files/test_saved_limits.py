"""What is saved can be loaded, or is not saved: other precisions, rounding, overflow, and numbers at the edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("structure", ["dense", "kron", "lowrank"])
def test_a_sum_of_two_precisions_is_as_rough_as_the_rougher(structure: str, order: list[int], tmp_path: Path) -> None:
    model = network()
    options: dict[str, Any] = {"parameters": "all", "structure": structure, "rank": 5}
    rough = errbar.collect(model, [inputs(9)], **options)
    fine = errbar.collect(model, [inputs(9, seed=1)], precision="float64", **options)
    days, names = [rough, fine], [tmp_path / "rough", tmp_path / "fine"]
    for day, name in zip(days, names, strict=True):
        day.save(name)
    both = days[order[0]] + days[order[1]]
    assert both.dtype == torch.float32
    both.save(tmp_path / "both")
    assert torch.equal(errbar.merge([tmp_path / "both"]).dense(), both.dense())
    merged = errbar.merge([names[index] for index in order])
    assert torch.equal(merged.dense(), both.dense())
    # With a model from the operand that has one, whatever its precision.
    for mixed in (errbar.merge(names[:1]) + fine, fine + errbar.merge(names[:1])):
        assert mixed.dtype == torch.float32
        assert errbar.condition(mixed, errbar.Prior(2.0)).predict(inputs(2)).pmf.isfinite().all()


def test_rough_data_can_be_forgotten_by_a_sum_of_fine_ones() -> None:
    model = network()
    fine = errbar.collect(model, [inputs(9)], parameters="all", precision="float64")
    left = fine - errbar.collect(model, [inputs(9)], parameters="all")
    assert left.dtype == torch.float32
    assert float(left.dense().abs().max()) <= 1e-5 * float(fine.dense().abs().max())


@pytest.mark.parametrize("structure", ["dense", "kron"])
def test_what_is_left_of_forgotten_discounted_data_can_be_loaded(structure: str, tmp_path: Path) -> None:
    """0.09 · 2 + 0.09 · 3 is more than 0.09 · 5."""
    model, x = network(), inputs(5)
    few, more = (errbar.collect(model, [part], last_layers=1, structure=structure) for part in (x[:2], x[2:]))
    discounted = few * 0.09 + more * 0.09
    assert discounted.n_samples > ((few + more) * 0.09).n_samples
    left = (few + more) * 0.09 - discounted
    left.save(tmp_path / "file")
    assert errbar.merge([tmp_path / "file"]).n_samples == left.n_samples == 0


def test_sums_that_overflowed_do_not_replace_a_file(tmp_path: Path) -> None:
    """Logits are finite where products of inputs are not: 10²⁵ squared is no number of float32."""
    model, path = nn.Sequential(nn.Linear(4, 3)), tmp_path / "file"
    with torch.no_grad():
        model[0].weight.mul_(1e-25)
    information = errbar.collect(model, [inputs(5)], last_layers=1)
    information.save(path)
    before = path.read_bytes()
    with pytest.raises(errbar.FileError, match=r"'sum' holds NaN or infinite values\..* use precision='float64'"):
        errbar.collect(model, [1e25 * inputs(5)], last_layers=1).save(path)
    with pytest.raises(errbar.FileError, match=r"holds NaN or infinite"):
        (information * 1e308).save(path)
    assert path.read_bytes() == before
    accurate = errbar.collect(model, [1e25 * inputs(5)], last_layers=1, precision="float64")
    accurate.save(path)
    assert torch.equal(errbar.merge([path]).dense(), accurate.dense())


def test_a_checkpoint_does_not_follow_a_fit_into_overflow(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(4, 3)), tmp_path / "file"
    with torch.no_grad():
        model[0].weight.mul_(1e-25)
    for _ in range(2):
        with pytest.raises(errbar.FileError, match=r"Cannot write .*'sum' holds NaN or infinite values"):
            errbar.collect(model, [inputs(5), 1e25 * inputs(5)], last_layers=1, checkpoint=path, every=1)
        assert errbar.verify(path, model).batches == 1


def test_names_that_cannot_be_printed_are_refused_before_they_are_saved(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("head\u00a0", nn.Linear(4, 3))
    information = errbar.collect(model, [inputs(2)], last_layers=1)
    with pytest.raises(errbar.ArgumentError, match=r"'head\\xa0\.weight' has a name with characters that cannot be"):
        information.save(tmp_path / "file")
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("number", [1e-305, 1e305])
def test_all_finite_numbers_come_back(number: float, tmp_path: Path) -> None:
    model = network(torch.float64)
    posterior = errbar.fit(model, [inputs(9).double()], last_layers=1, structure="diag", prior=errbar.Prior(number))
    posterior.with_calibration(covariance_scale=number).save(tmp_path / "file")
    loaded = errbar.load(tmp_path / "file", model)
    assert (loaded.prior.precision, loaded.covariance_scale) == (number, number)


@pytest.mark.parametrize("T", [1e-150, 1e150])
def test_temperatures_whose_square_is_no_number_are_refused(T: float) -> None:
    posterior = errbar.fit(network(), [inputs(9)], last_layers=1)
    with pytest.raises(errbar.ArgumentError, match=r"expected one from 1e-100 to 1e100"):
        posterior.with_calibration(temperature=T)
