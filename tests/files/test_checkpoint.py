"""Fits that are interrupted: what they continue with, what they end with, and what they refuse."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._files.checkpoint import batch_digest
from errbar._model.batch import Batch

STRUCTURES: dict[str, dict[str, Any]] = {
    "dense": {"last_layers": 2},
    "dense eta": {"last_layers": 2, "fisher": "eta"},
    "per class": {"last_layers": 1, "fisher": "eta"},
    "jacobians": {"parameters": "all"},
    "block": {"parameters": "all", "structure": "block"},
    "kron": {"parameters": "all", "structure": "kron"},
    "diag": {"parameters": "all", "structure": "diag"},
    "lowrank": {"parameters": "all", "structure": "lowrank", "rank": 6},
}


class InterruptionError(Exception):
    """What a fit is interrupted by."""


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 3)).to(dtype)


def stream(*, stop: int | None = None, count: int = 11, labels: bool = True, seed: int = 1) -> Iterator[Any]:
    """Batches of twenty samples, one after the other; with `stop`, an interruption in place of that batch."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        if index == stop:
            raise InterruptionError("power cut")
        x, y = torch.randn(20, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)
        yield (x, y) if labels else x


def same(first: errbar.Information, second: errbar.Information) -> bool:
    """To the last bit."""
    numbers = (first.n_samples, first.log_likelihood) == (second.n_samples, second.log_likelihood)
    numbers = numbers and first.seen == second.seen
    return numbers and torch.equal(first.dense(), second.dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_continued_fit_is_an_uninterrupted_one_to_the_last_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    options = STRUCTURES[name]
    model = network(dtype)
    expected = errbar.collect(model, stream(), checkpoint=tmp_path / "whole", every=3, **options)
    for stop in (7, 4, 10):
        with pytest.raises(InterruptionError, match="power cut"):
            errbar.collect(model, stream(stop=stop), checkpoint=tmp_path / "cut", every=3, **options)
    assert errbar.info(tmp_path / "cut").batches == 9
    found = errbar.collect(model, stream(), checkpoint=tmp_path / "cut", every=3, **options)
    assert same(found, expected)
    assert found.model is model


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "lowrank"])
def test_checkpoints_change_no_more_than_rounding(name: str, tmp_path: Path) -> None:
    plain = errbar.collect(network(), stream(), **STRUCTURES[name])
    parts = errbar.collect(network(), stream(), checkpoint=tmp_path / "file", every=2, **STRUCTURES[name])
    expected = plain.dense()
    torch.testing.assert_close(parts.dense(), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    assert parts.log_likelihood == pytest.approx(plain.log_likelihood, rel=1e-12)


def test_a_sketch_with_checkpoints_keeps_its_bound(tmp_path: Path) -> None:
    exact = errbar.collect(network(), stream(), parameters="all").dense()
    found = errbar.collect(network(), stream(), checkpoint=tmp_path / "file", every=2, **STRUCTURES["lowrank"])
    difference = torch.linalg.eigvalsh(exact - found.dense())
    assert float(difference.abs().max()) <= found.total.bound * (1 + 1e-9)  # type: ignore[union-attr]


def test_a_finished_checkpoint_is_kept_and_gives_the_result_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = errbar.collect(network(), stream(), last_layers=2, checkpoint=path)
    assert errbar.info(path).batches == 11
    before = path.read_bytes()
    again = errbar.collect(network(), stream(), last_layers=2, checkpoint=path)
    assert same(first, again)
    assert path.read_bytes() == before


def test_more_data_at_the_end_are_added_to_a_finished_checkpoint(tmp_path: Path) -> None:
    errbar.collect(network(), stream(count=5), last_layers=2, checkpoint=tmp_path / "file")
    found = errbar.collect(network(), stream(count=8), last_layers=2, checkpoint=tmp_path / "file")
    expected = errbar.collect(network(), stream(count=8), last_layers=2)
    torch.testing.assert_close(found.dense(), expected.dense(), rtol=1e-12, atol=1e-12)


def test_fit_takes_a_checkpoint_too(tmp_path: Path) -> None:
    with pytest.raises(InterruptionError, match="power cut"):
        errbar.fit(network(), stream(stop=5), last_layers=1, checkpoint=tmp_path / "file", every=2)
    assert errbar.info(tmp_path / "file").batches == 4
    posterior = errbar.fit(network(), stream(), last_layers=1, checkpoint=tmp_path / "file", every=2)
    assert posterior.information.n_samples == 220


def test_unlabelled_data_stay_unlabelled(tmp_path: Path) -> None:
    for _ in range(2):
        found = errbar.collect(network(), stream(labels=False), last_layers=1, checkpoint=tmp_path / "file", every=4)
        assert found.log_likelihood is None


def test_no_more_than_one_batch_is_held(tmp_path: Path) -> None:
    taken: list[int] = []
    done: list[int] = []

    def watched() -> Iterator[Any]:
        for index, batch in enumerate(stream()):
            taken.append(index)
            yield batch

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            done.append(len(taken))
            return super().forward(x)

    errbar.collect(Watching(4, 3).double(), watched(), last_layers=1, checkpoint=tmp_path / "file", every=50)
    assert max(b - a for a, b in pairwise(done)) <= 1


def test_a_full_disk_ends_a_fit_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = errbar.collect(network(), stream(), last_layers=2, checkpoint=tmp_path / "whole", every=3)
    calls = iter(range(100))
    real = os.fsync

    def full(descriptor: int) -> None:
        if next(calls) >= 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(errbar.FileError, match="No space left on device"):
            errbar.collect(network(), stream(), last_layers=2, checkpoint=tmp_path / "cut", every=3)
    assert errbar.verify(tmp_path / "cut", network()).batches == 6
    assert same(errbar.collect(network(), stream(), last_layers=2, checkpoint=tmp_path / "cut", every=3), expected)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def half(tmp_path: Path) -> Path:
    with pytest.raises(InterruptionError, match="power cut"):
        errbar.collect(network(), stream(stop=8), last_layers=2, checkpoint=tmp_path / "half", every=3)
    return tmp_path / "half"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_layers": 1}, "other parameters"),
        ({"last_layers": 2, "fisher": "eta"}, "other fisher"),
        ({"last_layers": 2, "structure": "diag"}, "other structure"),
        ({"last_layers": 2, "precision": "float64"}, "other precision"),
    ],
)
def test_a_checkpoint_of_other_options_is_refused(options: dict[str, Any], message: str, half: Path) -> None:
    before = half.read_bytes()
    with pytest.raises(errbar.MismatchError, match=f"{message}.* delete the file to start again"):
        errbar.collect(network(), stream(), checkpoint=half, **options)
    assert half.read_bytes() == before


def test_a_checkpoint_of_another_rank_is_refused(tmp_path: Path) -> None:
    for rank, message in ((4, None), (5, "other rank")):
        options: dict[str, Any] = {"parameters": "all", "structure": "lowrank", "rank": rank}
        if message is None:
            errbar.collect(network(), stream(), checkpoint=tmp_path / "file", **options)
        else:
            with pytest.raises(errbar.MismatchError, match=message):
                errbar.collect(network(), stream(), checkpoint=tmp_path / "file", **options)


def test_a_checkpoint_of_other_weights_is_refused(half: Path) -> None:
    other = network()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-6  # type: ignore[index,union-attr,operator]
    with pytest.raises(errbar.MismatchError, match="other weights of the model"):
        errbar.collect(other, stream(), last_layers=2, checkpoint=half)


def test_a_checkpoint_of_other_data_is_refused(half: Path) -> None:
    for data in (stream(seed=2), stream(labels=False), reversed(list(stream()))):
        with pytest.raises(errbar.MismatchError, match=r"holds other data: its 6 batches .* in the same order"):
            errbar.collect(network(), data, last_layers=2, checkpoint=half)
    with pytest.raises(errbar.MismatchError, match=r"holds 6 batches, and the data end after 4"):
        errbar.collect(network(), stream(count=4), last_layers=2, checkpoint=half)


def test_a_saved_posterior_is_not_overwritten_by_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "file"
    errbar.fit(network(), stream(), last_layers=1).save(path)
    before = path.read_bytes()
    with pytest.raises(errbar.FileError, match="holds a saved posterior, not a checkpoint, and is not overwritten"):
        errbar.collect(network(), stream(), last_layers=1, checkpoint=path)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_refused(half: Path) -> None:
    half.write_bytes(half.read_bytes()[:-1])
    with pytest.raises(errbar.DamagedFileError, match="truncated"):
        errbar.collect(network(), stream(), last_layers=2, checkpoint=half)


def test_checkpoints_that_cannot_be_are_refused_before_the_first_batch(tmp_path: Path) -> None:
    def untouched() -> Iterator[Any]:
        raise AssertionError("the data were read")
        yield

    for every in (0, -1, 2.5, True):
        with pytest.raises(errbar.ArgumentError, match=r"expected a whole number of batches"):
            errbar.collect(network(), untouched(), last_layers=1, checkpoint=tmp_path / "file", every=every)  # type: ignore[arg-type]
    for path in (5, b"file", "a\0b", ""):
        with pytest.raises(errbar.ArgumentError, match=r"path is .*; expected the name of a file"):
            errbar.collect(network(), untouched(), last_layers=1, checkpoint=path)  # type: ignore[arg-type]
    with pytest.raises(errbar.FileError, match=r"expected a folder .*missing that exists"):
        errbar.collect(network(), untouched(), last_layers=1, checkpoint=tmp_path / "missing" / "file")


def test_a_checkpoint_is_neither_loaded_nor_merged(half: Path) -> None:
    with pytest.raises(errbar.FileError, match="holds a checkpoint, not a posterior"):
        errbar.load(half, network())
    with pytest.raises(errbar.FileError, match="checkpoint of a fit that may not be complete"):
        errbar.merge([half])
    assert errbar.verify(half, network()).batches == 6


# ----------------------------------------------------------------------------------------------------------- digests


def test_the_digest_of_a_batch_tells_batches_apart() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.tensor([0, 1])
    batches = [
        Batch((x,), {}, y),
        Batch((x,), {}, None),
        Batch((x,), {}, y.flip(0)),
        Batch((x + 0.0, x), {}, y),
        Batch((x.double(),), {}, y),
        Batch((x.reshape(3, 2),), {}, y),
        Batch((x,), {"mask": x}, y),
        Batch((x,), {"mask": [x, None]}, y),
        Batch((x,), {"flag": True}, y),
        Batch((x,), {"flag": 1}, y),
        Batch((x.nextafter(torch.tensor(9.0)),), {}, y),
        Batch((x.to_sparse(), 1), {}, y),
        Batch((x,), {"thing": object()}, y),
    ]
    digests = [batch_digest(batch) for batch in batches]
    assert len(set(digests)) == len(batches)
    assert batch_digest(Batch((x.clone(),), {}, np.array([0, 1]))) == digests[0]
    assert batch_digest(Batch((x.T.contiguous().T,), {}, y)) == digests[0]
    assert batch_digest(batches[-1]) == digests[-1]


def test_the_digest_of_a_batch_takes_what_a_batch_can_hold() -> None:
    """Text, objects, numbers that torch does not have, and views that change what memory says."""
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    values: list[Any] = [
        np.array(["a", "b"]),
        np.array(["a", "c"]),
        np.array(["a", None], dtype=object),
        np.array(["a", 1], dtype=object),
        np.arange(2, dtype=np.longdouble),
        np.arange(1, 3, dtype=np.longdouble),
        np.array([0, 1], dtype=">i4"),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        complex_,
        complex_.conj(),
    ]
    assert len({batch_digest(Batch((value,))) for value in values}) == len(values)
    assert batch_digest(Batch((complex_.conj(),))) == batch_digest(Batch((complex_.conj().clone().resolve_conj(),)))
