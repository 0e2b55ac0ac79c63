"""Held-out data that were in the data of the fit are noticed, by the keys of some of the samples."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import draw, drawn_labels
from errbar._base.container import write
from errbar._files.task import information_record
from errbar._posterior.seen import MOST_KEYS, Seen
from networks import perceptron, seeded

SENTENCE = (
    "About 100% of the held-out samples were in the data of the fit (200 of 200 that were compared). On those the "
    "network is right far more often than on new data, so what is fitted to them makes predictions over-confident and "
    "error bars too narrow. Use samples that took part in neither the training nor the fit."
)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return seeded(lambda: perceptron(5, 6, 3))


def problem(network: nn.Module, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    x = draw(samples, 5, seed=seed)
    with torch.no_grad():
        return x, drawn_labels(torch.softmax(network(x), 1), seed)


def calibrate_warnings(posterior: errbar.Posterior, x: Tensor, y: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errbar.calibrate(posterior, [(x, y)], samples=50)
    return [str(one.message) for one in caught if "data of the fit" in str(one.message)]


def test_the_training_split_is_warned_of_in_any_order(network: nn.Module) -> None:
    x, y = problem(network, 200, 1)
    posterior = errbar.fit(network, [(x[:120], y[:120]), (x[120:], y[120:])], last_layers=1)
    with pytest.warns(errbar.CalibrationWarning) as caught:
        errbar.calibrate(posterior, [(x.flip(0), y.flip(0))], samples=50)
    assert [str(one.message) for one in caught].count(SENTENCE) == 1


def test_new_data_and_few_duplicates_are_not_warned_of(network: nn.Module) -> None:
    x, y = problem(network, 200, 1)
    new_x, new_y = problem(network, 200, 2)
    posterior = errbar.fit(network, [(x, y)], last_layers=1)
    assert not calibrate_warnings(posterior, new_x, new_y)
    for shared, expected in ((10, 0), (11, 1)):
        mixed_x, mixed_y = torch.cat([new_x[shared:], x[:shared]]), torch.cat([new_y[shared:], y[:shared]])
        assert len(calibrate_warnings(posterior, mixed_x, mixed_y)) == expected


def test_of_more_samples_than_keys_the_share_is_estimated(network: nn.Module) -> None:
    x, y = problem(network, 20 * MOST_KEYS, 1)
    posterior = errbar.fit(network, [(x, y)], last_layers=1)
    seen = posterior.information.seen
    assert seen is not None
    assert len(seen.counts) == MOST_KEYS
    # The keys are even numbers, so a twentieth of them is below the limit: 5 standard deviations.
    assert seen.limit / 2**53 == pytest.approx(1 / 20, rel=5 / MOST_KEYS**0.5)
    new_x, new_y = problem(network, 3000, 2)
    (text,) = calibrate_warnings(posterior, torch.cat([x[:3000], new_x]), torch.cat([y[:3000], new_y]))
    share, found, compared = int(text.split("%")[0].split()[-1]), *map(int, _numbers(text))
    assert share == round(100 * found / compared)
    # A twentieth of 6,000 samples is compared, half of which were in the fit: 4 standard deviations of each count.
    assert abs(compared - 300) < 4 * 300**0.5
    assert abs(found / compared - 0.5) < 4 * (0.25 / 300) ** 0.5


def _numbers(text: str) -> list[str]:
    inside = text[text.index("(") + 1 : text.index(")")].split()
    return [inside[0], inside[2]]


def test_data_that_repeat_themselves_prove_nothing(network: nn.Module) -> None:
    x, y = problem(network, 10, 1)
    posterior = errbar.fit(network, [(x.repeat(20, 1), y.repeat(20))], last_layers=1)
    assert not calibrate_warnings(posterior, x, y)


def test_keys_add_up_as_the_data_do(network: nn.Module) -> None:
    x, _ = problem(network, 3 * MOST_KEYS, 1)
    whole = errbar.collect(network, [x], last_layers=1).seen
    parts = [errbar.collect(network, [part], last_layers=1) for part in x.split(500)]
    assert whole == sum(parts[1:], parts[0]).seen
    assert whole == sum(parts[::-1]).seen


def test_what_is_forgotten_leaves_no_key(network: nn.Module) -> None:
    x, y = problem(network, 300, 1)
    posterior = errbar.fit(network, [(x, y)], last_layers=1).forget([(x[:100], y[:100])])
    assert posterior.information.seen == errbar.collect(network, [x[100:]], last_layers=1).seen
    assert not calibrate_warnings(posterior, x[:100], y[:100])


def test_of_equal_samples_one_can_be_forgotten() -> None:
    assert Seen({3: 2, 5: 1}) - Seen({3: 1}) == Seen({3: 1, 5: 1})
    assert Seen({3: 2, 5: 1}, limit=6) + Seen({4: 1, 9: 7}) == Seen({3: 2, 4: 1, 5: 1}, limit=6)


def test_files_keep_the_keys(network: nn.Module, tmp_path: Path) -> None:
    x, y = problem(network, 200, 1)
    path = tmp_path / "posterior.safetensors"
    errbar.fit(network, [(x, y)], last_layers=1).save(path)
    loaded = errbar.load(path, network)
    assert calibrate_warnings(loaded, x, y) == [SENTENCE]


@pytest.mark.parametrize(
    "seen",
    [
        {"limit": 9, "keys": [5, 3], "counts": [1, 1]},
        {"limit": 4, "keys": [5], "counts": [1]},
        {"limit": 9, "keys": [5], "counts": []},
    ],
)
def test_keys_of_a_file_that_do_not_fit_together_are_refused(
    seen: dict[str, Any], network: nn.Module, tmp_path: Path
) -> None:
    information = errbar.collect(network, [problem(network, 20, 1)], last_layers=1)
    description, tensors = information_record(information, None)
    write(tmp_path / "file", "information", description | {"seen": seen}, tensors)
    with pytest.raises(errbar.DamagedFileError, match="holds keys of its samples that do not fit together"):
        errbar.merge([tmp_path / "file"])
    write(tmp_path / "old", "information", description | {"seen": None}, tensors)
    assert errbar.merge([tmp_path / "old"]).seen is None


def test_keys_thin_out_large_samples_and_tell_them_apart(network: nn.Module) -> None:
    model = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 40, 2)))
    x = draw(30, 3, 40, 40)
    seen = errbar.collect(model, [x], parameters="all", structure="diag").seen
    assert seen is not None
    assert len(seen.counts) == 30
    assert not seen.is_repetitive()


def test_information_without_keys_stops_nothing(network: nn.Module) -> None:
    x, y = problem(network, 40, 1)
    information = errbar.collect(network, [(x, y)], last_layers=1)
    without = errbar.condition(errbar.Information(information.task, information.total, 40, None), errbar.Prior())
    assert without.information.seen is None
    assert (information + without.information).seen is None
    assert not calibrate_warnings(without, x, y)
