"""Who reads what, and how it is put together again: teams of threads, without a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

from errbar._distributed import order
from errbar._distributed.order import Columns, Share, concatenated, share_of, used_in_order
from errbar._distributed.team import Team
from errbar.errors import DataError, RankError


@dataclass(frozen=True, eq=False)
class Meeting:
    """Where ranks that are threads of one process meet."""

    size: int
    barrier: threading.Barrier
    table: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ThreadTeam(Team):
    """A team whose ranks are threads: what a rank says is there for all once all have spoken."""

    meeting: Any = None

    def exchange(self, value: Any) -> list[Any]:
        self.meeting.table[self.rank] = value
        self.meeting.barrier.wait(20)
        everyone = [self.meeting.table[rank] for rank in range(self.size)]
        self.meeting.barrier.wait(20)
        return everyone

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.exchange(value)[source]

    def brought_to_the_first(self, values: Tensor, source: int) -> Tensor:
        """Two ranks alone take part: a table of their own."""
        key = ("block", source)
        if self.rank == source:
            self.meeting.table[key] = values
            self.meeting.table[source, "sent"].set()
            return values
        assert self.meeting.table[source, "sent"].wait(20)
        self.meeting.table[source, "sent"].clear()
        found: Tensor = self.meeting.table[key]
        assert found.shape == values.shape
        return found

    def watched(self, items: Iterator[Any]) -> Iterator[Any]:
        return items

    def _leave_notice(self) -> None:
        return


def of_all_ranks(size: int, work: Callable[[Team], Any]) -> list[Any]:
    """What `work` returns or raises on each rank."""
    meeting = Meeting(size, threading.Barrier(size))
    meeting.table.update({(rank, "sent"): threading.Event() for rank in range(size)})  # type: ignore[misc]

    def tried(rank: int) -> Any:
        try:
            return work(ThreadTeam(rank, size, meeting=meeting) if size > 1 else Team())
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(tried, range(size)))


def results(share: Share) -> Any:
    """The inputs themselves, their numbers where they are known, and texts beside them."""
    for placed in share.stream:
        x = placed.batch.args[0]
        names = [] if placed.first is None else range(placed.first, placed.first + len(x))
        yield placed.place, {"x": x, "names": list(names), "texts": [str(float(v)) for v in x]}


def read(rows: Iterator[Columns]) -> tuple[list[float], list[int], list[int], list[str]]:
    x: list[float] = []
    names: list[int] = []
    sizes: list[int] = []
    texts: list[str] = []
    for columns in rows:
        assert isinstance(columns["x"], Tensor)
        x += columns["x"].tolist()
        names += columns["names"]
        texts += columns["texts"]
        sizes.append(len(columns["x"]))
    return x, names, sizes, texts


def joined(data: Callable[[int], Any], size: int, folder: Path | None = None) -> Any:
    """All inputs as the first rank of `size` has them, or the errors of all ranks."""

    def work(team: Team) -> Any:
        share = share_of(data(team.rank), team, title="Reading")
        return used_in_order(read, results(share), share, team, folder)

    first, *others = of_all_ranks(size, work)
    if isinstance(first, Exception):
        return [first, *others]
    assert others == [None] * (size - 1)
    return first


DATA = TensorDataset(torch.arange(23.0))


def a_loader(rank: int, **keywords: Any) -> Any:
    return DataLoader(DATA, **{"batch_size": 4, **keywords})


def shuffled(rank: int) -> Any:
    """Each rank would draw another order by itself."""
    return a_loader(rank, shuffle=True, generator=torch.Generator().manual_seed(5 + rank))


def subset(rank: int) -> Any:
    chosen = SubsetRandomSampler(range(0, 23, 2), generator=torch.Generator().manual_seed(rank))
    return a_loader(rank, sampler=chosen)


def batches_one_by_one(rank: int) -> Any:
    return DataLoader(TensorDataset(torch.arange(22.0).reshape(11, 2)), batch_size=None)


def stream(rank: int) -> Any:
    return iter(torch.arange(23.0).split([3, 1, 7, 2, 10]))


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize(
    "data",
    [
        a_loader,
        partial(a_loader, drop_last=True),
        partial(a_loader, batch_size=100),
        shuffled,
        subset,
        batches_one_by_one,
        stream,
    ],
)
def test_ranks_together_give_the_batches_of_one_process_in_its_order(
    data: Callable[[int], Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_BLOCK_BYTES", 100)
    expected = joined(data, 1)
    found = joined(data, size)
    assert found[0] == expected[0]
    assert found[2:] == expected[2:]
    # Where the size of batches is not known, nobody can say how many inputs come before.
    assert found[1] == ([] if data is batches_one_by_one else list(range(len(found[0]))))


def test_each_rank_computes_a_part() -> None:
    for data, sizes in ((a_loader, [2, 2, 2]), (stream, [2, 2, 1])):
        counts = of_all_ranks(3, lambda team, data=data: sum(1 for _ in share_of(data(0), team, title="").stream))
        assert counts == sizes


def test_parts_of_their_own_follow_each_other_by_rank() -> None:
    own = [torch.arange(5.0), torch.empty(0), torch.arange(5.0, 12.0)]
    x, names, *_ = joined(lambda rank: [part for part in own[rank].split(2) if len(part)], 3)
    assert x == list(range(12))
    assert names == []


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_distributed_sampler_gives_way_to_whole_batches_without_padding(shuffle: bool) -> None:
    def loader(rank: int, replicas: int = 3) -> Any:
        return a_loader(rank, sampler=DistributedSampler(DATA, replicas, rank, shuffle=shuffle, seed=2))

    x, names, *_ = joined(loader, 3)
    assert x == joined(partial(loader, replicas=1), 1)[0]
    assert sorted(x) == names == list(range(23))


def test_data_that_do_not_fit_together_are_refused_by_all_ranks() -> None:
    def other_length(rank: int) -> Any:
        return DataLoader(TensorDataset(torch.arange(20.0 + rank)), batch_size=4)

    def later_changes(rank: int) -> Any:
        return [torch.zeros(2), torch.full((2,), float(rank))]

    def some_alike(rank: int) -> Any:
        return [torch.full((2,), float(rank // 2))]

    def other_kind(rank: int) -> Any:
        return a_loader(rank) if rank else stream(rank)

    for data, sentence in (
        (other_length, "Rank 0 has a data set of 20 samples, rank 1 one of 21"),
        (later_changes, "All ranks read the same first batch, and then different ones"),
        (some_alike, "Some ranks read the same first batch, and others another one"),
        (other_kind, "The data of rank 0 are its own batches, those of rank 1 are a whole data set"),
    ):
        errors = joined(data, 3)
        assert [type(error) for error in errors] == [DataError] * 3
        assert all(sentence in str(error) for error in errors), errors


def test_nobody_waits_when_the_first_rank_cannot_write() -> None:
    def work(team: Team, begin: bool) -> None:
        def broken(rows: Iterator[Columns]) -> None:
            if begin:
                next(rows)
            raise OSError("no room on the disk")

        share = share_of(a_loader(team.rank), team, title="")
        used_in_order(broken, results(share), share, team)

    for begin in (False, True):
        first, *others = of_all_ranks(3, partial(work, begin=begin))
        assert isinstance(first, OSError)
        assert [type(error) for error in others] == [RankError] * 2
        assert all("Rank 0 failed with OSError: no room on the disk" in str(error) for error in others)


def test_an_error_on_one_rank_is_raised_by_all_before_anything_is_used() -> None:
    used = []

    def work(team: Team) -> None:
        def failing() -> Any:
            yield from results(share)
            if team.rank == 2:
                raise DataError("The last picture is broken.")

        share = share_of(a_loader(team.rank), team, title="")
        used_in_order(used.append, failing(), share, team)

    errors = of_all_ranks(3, work)
    assert [type(error) for error in errors] == [DataError] * 3
    assert str(errors[0]) == "On rank 2: The last picture is broken."
    assert used == []


def test_a_part_that_cannot_be_read_back_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = order._Part.next_block

    def failing(part: Any) -> bytes:
        if threading.current_thread().name == "reads badly":
            raise OSError("the disk is gone")
        return whole(part)

    monkeypatch.setattr(order._Part, "next_block", failing)

    def work(team: Team) -> None:
        if team.rank == 1:
            threading.current_thread().name = "reads badly"
        share = share_of(a_loader(team.rank), team, title="")
        used_in_order(read, results(share), share, team)

    errors = of_all_ranks(2, work)
    assert [type(error) for error in errors] == [RankError, OSError]


def test_large_parts_wait_on_the_disk_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_HELD_BYTES", 10)
    assert joined(a_loader, 2, tmp_path)[0] == list(range(23))
    assert joined(a_loader, 2, tmp_path / "only on another machine")[0] == list(range(23))
    assert list(tmp_path.iterdir()) == []


def test_columns_that_a_batch_lacks_are_left_out_and_nothing_is_an_error() -> None:
    found = concatenated([{"a": torch.zeros(2), "b": torch.ones(2)}, {"a": torch.ones(1)}])
    assert {name: values.tolist() for name, values in found.items()} == {"a": [0.0, 0.0, 1.0]}
    with pytest.raises(DataError, match="The data are empty"):
        concatenated([])
