"""Notices before work that takes long: when they come, what they say, and that they cost no pass of the network."""

from __future__ import annotations

import contextlib
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import errbar
from errbar._base.speed import MachineSpeed
from errbar._curvature.layout import Layout
from errbar._curvature.workload import Cost, Workload
from errbar._planning import notice
from errbar._planning.seconds import Seconds
from networks import perceptron


class Long(Dataset[tuple[Tensor, int]]):
    """So many samples; reading one after the first batch fails, so that a fit ends when it begins."""

    def __init__(self, x: Tensor, count: int) -> None:
        self.x, self.count = x, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= 512:
            raise BegunError
        return self.x[index % len(self.x)], 0


class BegunError(Exception):
    """The fit has read its first batch, and all that comes before it has happened."""


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that multiplies 10⁹ times a second, on which a pass takes a millisecond for each sample."""
    speed = MachineSpeed(product=1e-9, double=1e-9, draw=1e-9)
    monkeypatch.setattr(MachineSpeed, "of", staticmethod(lambda device, dtype: speed))
    monkeypatch.setattr("errbar._curvature.layout._require_separate_samples", lambda *_: 1e-3)
    monkeypatch.setattr(Layout, "tail_share", lambda layout, selection: float(selection.n_parameters > 15))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def begun(data: Any, model: torch.nn.Module | None = None, **options: Any) -> list[str]:
    """What is told before a fit begins."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(BegunError):
            errbar.fit(perceptron(6, 5, 4, 3) if model is None else model, data, **options)
    return [str(warning.message) for warning in caught if warning.category is errbar.CostNotice]


def test_a_long_fit_is_told_of_once_before_it_begins() -> None:
    """1 ms forward, and 2 ms back for each of 3 classes through all layers: 7 ms, and hardly any products."""
    (told,) = begun(Long(normal(8, 6), 10_240), parameters="all", structure="diag")
    found = re.match(r"The fit to 10,240 samples will take about ([\d.]+) s, by the costs of errbar\.plan\.", told)
    assert found is not None, told
    assert float(found[1]) == pytest.approx(7e-3 * 10_240, rel=0.02)
    assert "Quicker: fisher='sampled' (about " in told
    assert "last_layers=1 (about " in told
    assert told.endswith("warnings.simplefilter('ignore', errbar.CostNotice) silences this.")


def test_what_is_quicker_takes_as_long_as_it_says() -> None:
    """A drawn label takes one pass back in place of three: 3 ms."""
    (told,) = begun(Long(normal(8, 6), 10_240), parameters="all", structure="diag")
    (seconds,) = re.findall(r"fisher='sampled' \(about ([\d.]+) s in all\)", told)
    assert float(seconds) == pytest.approx(3e-3 * 10_240, rel=0.02)
    assert begun(Long(normal(8, 6), 9_728), parameters="all", structure="diag", fisher="sampled") == []


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Long(normal(8, 6), 4_096), {"parameters": "all", "structure": "diag"}),
        (Long(normal(8, 6), 20_480), {"last_layers": 1}),
        ((batch for batch in [normal(8, 6)]), {"parameters": "all", "structure": "diag"}),
        ([normal(8, 6)] * 4, {"parameters": "all"}),
    ],
    ids=["short", "one layer", "of unknown length", "few"],
)
def test_what_is_short_or_unknown_is_not_told_of(data: Any, options: dict[str, Any]) -> None:
    assert begun(data, **options) == []


def test_the_threshold_is_thirty_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 7e-3 * 4_096
    assert seconds < notice.NOTICED_SECONDS == 30.0
    monkeypatch.setattr(notice, "NOTICED_SECONDS", 0.9 * seconds)
    assert len(begun(Long(normal(8, 6), 4_096), parameters="all", structure="diag")) == 1


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes a microsecond for a multiplication."""
    speed = MachineSpeed(product=1e-9, double=1e-6, draw=1e-9)
    monkeypatch.setattr(MachineSpeed, "of", staticmethod(lambda device, dtype: speed))
    monkeypatch.setattr(notice, "_SLOW", speed)


def test_a_long_factorisation_and_first_prediction_are_told_of_before_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """n = 606: n³/3 multiplications to factorise and 2 n³/3 for P itself, here with a microsecond for each."""
    slow(monkeypatch)
    model, x = perceptron(100, 6), normal(8, 100)
    with pytest.warns(errbar.CostNotice) as told:
        posterior = errbar.fit(model, [x], last_layers=1)
    # Everything else would be an error now, because it has been told of.
    posterior.predict(x)
    posterior.with_prior(errbar.Prior(2.0)).predict(x)
    (message,) = [str(warning.message) for warning in told]
    sentence = r"The factorisation will take about ([\d.]+) s and the first prediction about ([\d.]+) s,"
    found = re.match(sentence, message)
    assert found is not None, message
    assert float(found[1]) == pytest.approx(606**3 / 3e6, rel=0.1)
    assert float(found[2]) == pytest.approx(2 * 606**3 / 3e6, rel=0.1)
    assert "Quicker: structure='kron' (about " in message


def test_a_factorisation_alone_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    information = errbar.collect(perceptron(100, 6), [normal(8, 100)], last_layers=1)
    slow(monkeypatch)
    with pytest.warns(errbar.CostNotice, match=r"^The factorisation will take about [\d.]+ s, by the costs"):
        posterior = errbar.condition(information, errbar.Prior())
    with pytest.warns(errbar.CostNotice, match=r"^The first prediction will take about [\d.]+ s, .*a fit with struct"):
        posterior.logits(normal(8, 100))
    posterior.logits(normal(8, 100))


def test_a_long_prediction_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight inputs of 7 ms, and one for the call; samples do not matter where P^g takes the time."""
    x = normal(8, 6)
    posterior = errbar.fit(perceptron(6, 5, 4, 3), [x], parameters="all", structure="diag")
    posterior.predict(x)
    monkeypatch.setattr(notice, "NOTICED_SECONDS", 0.05)
    with pytest.warns(errbar.CostNotice, match=r"^The prediction for 8 inputs will take about 57 ms") as told:
        posterior.predict(x)
    posterior.predict(x)
    assert len(told) == 1
    assert "samples=100" not in str(told[0].message)


def test_fewer_draws_are_advised_where_draws_are_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 8 ms for each of 400 draws, one for the mean, and a millisecond for the call."""
    x = normal(8, 6)
    posterior = errbar.fit(perceptron(6, 5, 500), [x], parameters="all", structure="diag")
    monkeypatch.setattr(notice, "NOTICED_SECONDS", 1.0)
    with pytest.warns(errbar.CostNotice, match=r"^The first prediction will take about 3\.21 s, ") as told:
        posterior.predict(x, samples=400)
    assert "Quicker: samples=100 (about 810 ms in all)" in str(told[0].message)


def test_a_mixture_is_told_of_without_advice_that_would_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names a layer that is not among the last."""
    x = normal(8, 6)
    mixture = {"0": "kron", "*": "block"}
    posterior = errbar.fit(perceptron(6, 5, 250), [x], parameters="all", structure=mixture, fisher="sampled")
    monkeypatch.setattr(notice, "NOTICED_SECONDS", 1.0)
    with pytest.warns(errbar.CostNotice, match=r"^The first prediction will take about .* samples=100 ") as told:
        posterior.predict(x, samples=400)
    assert "last_layers" not in str(told[0].message)


def test_what_is_refused_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    for module in ("errbar._base.memory", "errbar._planning.choice"):
        monkeypatch.setattr(f"{module}.available_bytes", lambda device: 10**6)
    with pytest.raises(errbar.SizeError, match="needs"):
        errbar.fit(perceptron(100, 6), [normal(8, 100)], last_layers=1)


def test_small_fits_do_not_even_try_out_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried_out(device: torch.device, dtype: torch.dtype) -> MachineSpeed:
        raise AssertionError("nothing needs to be tried out")

    monkeypatch.setattr(MachineSpeed, "of", staticmethod(tried_out))
    x = normal(8, 6)
    errbar.fit(perceptron(6, 5, 4, 3), [x], parameters="all").predict(x)


def test_a_posterior_from_a_file_is_not_told_of(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = perceptron(100, 6), normal(8, 100)
    errbar.fit(model, [x], last_layers=1).save(tmp_path / "it.safetensors")
    slow(monkeypatch)
    errbar.load(tmp_path / "it.safetensors", model).predict(x)


def test_an_unknown_time_of_a_pass_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("errbar._curvature.layout._require_separate_samples", lambda *_: float("inf"))
    assert begun(Long(normal(8, 6), 10_240), parameters="all", structure="diag") == []


def test_the_time_of_a_pass_comes_from_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    seen: list[Layout] = []
    monkeypatch.setattr("errbar._posterior.collect.tell_of_fit", lambda task, rank, samples: seen.append(task.layout))
    errbar.collect(perceptron(6, 5, 4, 3), [normal(8, 6)], last_layers=1)
    errbar.collect(perceptron(6, 5, 4, 3), [normal(1, 6)], last_layers=1)
    assert 0 < seen[0].sample_seconds < 10
    assert seen[1].sample_seconds == float("inf")


def test_on_a_gpu_that_waits_for_its_kernels_the_batch_does_not_matter() -> None:
    """A pass that takes no longer than to start its kernels: seconds are those of the batch, whatever its size."""
    cost = Cost(0, 0, 0, 0.0, 0.0, 0.0, (0.0, 0.0), exact=True)
    empty = Workload((), (), (), 10, 1, "ggn", 4, 4, 0, "cuda", 1, 0)
    speed = MachineSpeed(product=0.0, double=0.0, draw=0.0, launch=1e-5)
    pass_seconds = 1e-3

    def batch_seconds(size: int, seeds: float, calls: int = 50) -> float:
        work = replace(empty, batch=size, calls=calls)
        own = Seconds.of(replace(cost, seeds=(seeds, 0.0)), work, 1.0, pass_seconds / size, speed)
        return own.sample * size

    assert batch_seconds(16, 1) == pytest.approx(batch_seconds(64, 1))
    # Python, the pass, three more to trace it and as many to go back, and the backward pass itself.
    assert batch_seconds(16, 1) == pytest.approx(1.3e-3 + (1 + 3 + 3 + 2) * pass_seconds)
    # Further seeds go with the kernels of the first.
    assert batch_seconds(16, 10) - batch_seconds(16, 1) == pytest.approx(9 * 0.4 * 2 * pass_seconds)
    # Where the kernels are large, starting them does not count.
    assert batch_seconds(16, 10, calls=0) == pytest.approx(1.3e-3 + (1 + 10 * 2) * pass_seconds)
