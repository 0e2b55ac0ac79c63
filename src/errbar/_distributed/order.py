"""Results of several ranks in the order of the inputs: which rank reads which batches, and how their parts are joined.

| data | each rank reads | order of the whole |
|---|---|---|
| a DataLoader over a data set with a length, with a sampler of torch | consecutive batches of it | that of rank 0 |
| any other, the same on all ranks | all of it, and computes for every R-th batch | its own |
| any other, different on each rank | all of it | those of rank 0, then those of rank 1, … |

Batches stay whole, so each result is what one process makes of the same batch. A rank keeps its results in a *part*, an
unnamed file that goes with the process, however that ends. Once all parts are complete, the first rank asks for them
block by block, and holds one block of each rank. So ranks need no common folder.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from errbar._base.digest import digest_of
from errbar._base.progress import track
from errbar._distributed.shards import OWN, WHOLE, is_distributed, length_of, reloaded, require_one_division, sampler_of
from errbar._distributed.team import Team
from errbar._model.batch import Batch, batches, count_batches
from errbar.errors import DataError

Result = TypeVar("Result")
Place = tuple[int, int]
Columns = Mapping[str, Tensor | Sequence[Any]]

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Bytes of results that are sent at a time, and that a rank holds before they go to the disk.
_BLOCK_BYTES, _HELD_BYTES = 2**22, 2**26
_DONE = -1


@dataclass(frozen=True, eq=False)
class Placed:
    """A batch, its place among those of all ranks, and the number of inputs before it where that is known."""

    place: Place
    first: int | None
    batch: Batch


@dataclass(frozen=True, eq=False)
class Share:
    """What this rank reads, within a step; `check` is for all ranks to call once they have read theirs."""

    stream: Iterator[Placed]
    check: Callable[[], None] = lambda: None


# ------------------------------------------------------------------------------------------- which rank reads what


def share_of(data: Any, team: Team, *, title: str, progress: bool = False) -> Share:
    """The batches of this rank, each with its place. A collective call."""
    if team.is_alone:
        return Share(_numbered(_tracked(data, title, progress), 0))
    claim = team.together(lambda: _claim(data))
    claims = team.exchange(claim)
    if any(kind == WHOLE for kind, _ in claims):
        require_one_division(claims)
        listed = team.broadcast(team.together(lambda: _listed(data) if team.leads else None))
        return Share(team.watched(_consecutive(data, listed, team, title, progress and team.leads)))
    return _streamed(data, team, title, progress and team.leads)


def _claim(data: Any) -> tuple[str, tuple[Any, ...]]:
    sampler = sampler_of(data)
    if type(sampler) not in _SAMPLERS and not is_distributed(sampler):
        return OWN, ()
    length = length_of(data.dataset)
    return WHOLE, (length, digest_of([data.dataset[0]]) if length else None)


def _tracked(data: Any, title: str, progress: bool) -> Iterator[Batch]:
    return track(batches(data), title, total=count_batches(data), enabled=progress)


def _numbered(stream: Iterable[Batch], rank: int, first: int | None = 0) -> Iterator[Placed]:
    """Batches of which each follows the one before it."""
    for number, batch in enumerate(stream):
        yield Placed((rank, number), first, batch)
        first = None if first is None else first + len(batch)


# ------------------------------------------------------------------------------------ a data set that can be divided


def _listed(loader: DataLoader[Any]) -> list[list[int]] | None:
    """The samples of each batch, as one process would read them; None where they follow each other."""
    sampler = sampler_of(loader)
    if type(sampler) is SequentialSampler:
        return None
    if is_distributed(sampler):
        # Those of all its ranks together, without padding.
        whole: DistributedSampler[Any] = DistributedSampler(sampler.dataset, 1, 0, sampler.shuffle, sampler.seed)
        whole.set_epoch(sampler.epoch)
        samples = list(whole)
        size = _batch_size(loader)
        return [samples[start : start + size] for start in range(0, len(samples), size)]
    # With the loader's own generator, of which a loader draws before its sampler does.
    numbers: Any = _Numbers()
    if loader.batch_sampler is None:
        each = DataLoader(numbers, batch_size=None, sampler=loader.sampler, generator=loader.generator)
        return [[int(number)] for number in each]
    return list(
        DataLoader(numbers, batch_sampler=loader.batch_sampler, generator=loader.generator, collate_fn=_as_it_is)
    )


class _Numbers(Dataset[int]):
    """A data set whose samples are their own numbers."""

    def __getitem__(self, index: int) -> int:
        return index


def _as_it_is(batch: Any) -> Any:
    return batch


def _batch_size(loader: DataLoader[Any]) -> int:
    return getattr(loader.batch_sampler, "batch_size", 1)


def _consecutive(
    loader: DataLoader[Any], listed: list[list[int]] | None, team: Team, title: str, progress: bool
) -> Iterator[Placed]:
    """This rank's batches: those from R-th to R-th of all, in their order."""
    if listed is None:
        size, length = _batch_size(loader), length_of(loader.dataset)
        drops = getattr(loader.batch_sampler, "drop_last", False)
        numbers = _part(range(length // size if drops else -(-length // size)), team)
        mine = [list(range(size * number, min(size * (number + 1), length))) for number in numbers]
        first = size * numbers.start
    else:
        numbers = _part(range(len(listed)), team)
        mine = listed[numbers.start : numbers.stop]
        first = sum(map(len, listed[: numbers.start]))
    # Items of a data set without batches of the loader's are batches themselves, of a size that only they know.
    is_known = loader.batch_sampler is not None
    return _numbered(_tracked(reloaded(loader, mine), title, progress), team.rank, first if is_known else None)


def _part(numbers: range, team: Team) -> range:
    count = len(numbers)
    return numbers[count * team.rank // team.size : count * (team.rank + 1) // team.size]


# ------------------------------------------------------------------------------------------------------ any iterable


def _streamed(data: Any, team: Team, title: str, progress: bool) -> Share:
    """Data that each rank has to read from the beginning: the same, of which it takes every R-th batch, or its own."""

    def begin() -> tuple[Iterator[Batch], str | None]:
        stream = _tracked(data, title, progress)
        first = next(stream, None)
        return chain([] if first is None else [first], stream), None if first is None else _digest(first)

    stream, digest = team.together(begin)
    digests = team.exchange(digest)
    if len(set(digests)) == 1:
        seen = hashlib.sha256()
        return Share(team.watched(_dealt(stream, seen, team)), lambda: _require_same_stream(seen.hexdigest(), team))
    different = [digest for digest in digests if digest is not None]
    if len(set(different)) < len(different):
        raise DataError(
            "Some ranks read the same first batch, and others another one; expected the same data on all ranks, which "
            "errbar divides, or on each rank a part of its own."
        )
    return Share(team.watched(_numbered(stream, team.rank, None)))


def _dealt(stream: Iterator[Batch], seen: Any, team: Team) -> Iterator[Placed]:
    first = 0
    for number, batch in enumerate(stream):
        seen.update(_digest(batch).encode())
        if number % team.size == team.rank:
            yield Placed((number, 0), first, batch)
        first += len(batch)


def _digest(batch: Batch) -> str:
    return digest_of((batch.args, batch.kwargs))


def _require_same_stream(digest: str, team: Team) -> None:
    if len(set(team.exchange(digest))) > 1:
        raise DataError(
            "All ranks read the same first batch, and then different ones; expected the same data on all ranks, which "
            "errbar divides, or on each rank a part of its own. Use a fixed seed where inputs are changed at random."
        )


# ----------------------------------------------------------------------------------------------------- joining parts


def used_in_order(
    use: Callable[[Iterator[Columns]], Result],
    results: Generator[tuple[Place, Columns], None, None],
    share: Share,
    team: Team,
    folder: Path | None = None,
) -> Result | None:
    """`use` of the columns of all batches, in the order of the inputs; on the first rank alone, to which the others
    give theirs. A collective call: an error on one rank is raised by all.

    Several ranks compute everything before `use` begins. Parts that are too large for the memory wait in `folder`, if
    this machine has it.
    """
    where = str(folder) if folder is not None and folder.is_dir() else None
    # Closed here, so that a mistake ends the progress line before it is told.
    with closing(results), tempfile.SpooledTemporaryFile(_HELD_BYTES, dir=where) as file:
        columns = _joined(results, share, team, file)

        def step() -> Result | None:
            # Closed within the step: that tells the others that nothing more will be asked for.
            with closing(columns):
                if team.leads:
                    return use(columns)
                _exhausted(columns)
                return None

        return team.together(step)


def _exhausted(columns: Iterator[Columns]) -> None:
    for _ in columns:
        raise AssertionError("only the first rank is given columns")


def concatenated(rows: Iterable[Columns]) -> dict[str, Tensor]:
    """Tensors of all batches one after the other, under the names that every batch has."""
    columns: dict[str, list[Tensor]] = {}
    count = 0
    for part in rows:
        count += 1
        for name, values in part.items():
            columns.setdefault(name, []).append(torch.as_tensor(values))
    if not count:
        raise DataError("The data are empty: expected at least one batch.")
    return {name: torch.cat(parts) for name, parts in columns.items() if len(parts) == count}


def _joined(
    results: Generator[tuple[Place, Columns], None, None], share: Share, team: Team, file: Any
) -> Generator[Columns, None, None]:
    if team.is_alone:
        return (columns for _, columns in results)
    part = team.together(lambda: _Part.of(results, file))
    share.check()
    if not team.leads:
        return _given(part, team)
    columns = _asked_for(part, team)
    next(columns)
    return columns


class _Part:
    """The results of one rank, in blocks: lists of (place, columns)."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sizes: list[int] = []

    @classmethod
    def of(cls, results: Iterable[tuple[Place, Columns]], file: IO[bytes]) -> _Part:
        """All results, computed now and kept in the file."""
        part = cls(file)
        block: list[tuple[Place, dict[str, Any]]] = []
        size = 0
        for place, columns in results:
            # A slice would be written together with all that it is a slice of.
            plain = {name: v.detach().cpu().clone() if isinstance(v, Tensor) else [*v] for name, v in columns.items()}
            block.append((place, plain))
            size += sum(v.nbytes if isinstance(v, Tensor) else 16 * len(v) for v in plain.values())
            if size >= _BLOCK_BYTES:
                part._add(block)
                block, size = [], 0
        part._add(block)
        file.seek(0)
        return part

    def _add(self, block: list[Any]) -> None:
        if block:
            content = io.BytesIO()
            torch.save(block, content)
            self.sizes.append(self.file.write(content.getbuffer()))

    def next_block(self) -> bytes:
        """The next block as it was saved; nothing after the last."""
        return self.file.read(self.sizes.pop(0)) if self.sizes else b""


def _asked_for(part: _Part, team: Team) -> Generator[Columns, None, None]:
    """On the first rank: all columns, from blocks that it asks for; the others wait for what it asks.

    The first thing that it yields is nothing: a generator that was not begun would be closed without telling them.
    """
    others_wait = True

    def block_of(rank: int) -> bytes:
        nonlocal others_wait
        if rank == team.rank:
            return part.next_block()
        others_wait = False
        team.broadcast(rank)
        content = _brought(part, rank, team)
        others_wait = True
        return content

    def entries(rank: int) -> Iterator[tuple[Place, Columns]]:
        while content := block_of(rank):
            yield from torch.load(io.BytesIO(content), weights_only=True)

    try:
        yield {}
        for _, columns in heapq.merge(*map(entries, range(team.size)), key=lambda entry: entry[0]):
            yield columns
    finally:
        # An error while a block is brought is raised by all ranks, so nobody waits after it.
        if others_wait:
            team.broadcast(_DONE)


def _given(part: _Part, team: Team) -> Generator[Columns, None, None]:
    """On the other ranks: no columns, but their blocks for the first rank whenever it asks for one."""
    while (rank := team.broadcast(None)) != _DONE:
        _brought(part, rank, team)
    yield from ()


def _brought(part: _Part, source: int, team: Team) -> bytes:
    """On the first rank the next block of rank `source`."""
    block = team.together(lambda: part.next_block() if team.rank == source else b"")
    size = team.broadcast(len(block), source)
    if not size or team.rank not in (0, source):
        return b""
    message = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(size, dtype=torch.uint8)
    return team.brought_to_the_first(message, source).numpy().tobytes()
