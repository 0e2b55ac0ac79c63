"""Which samples a rank reads, so that all ranks together read each of them once.

| data | each rank reads | on all ranks there must be |
|---|---|---|
| a Dataset with a length | a contiguous part, no padding | the whole of it |
| a DataLoader over one: in order, shuffled, or of a subset | a contiguous part, in its batches | the whole of it |
| a DataLoader with a DistributedSampler | the sampler's samples without its padding | samplers that fit together |
| an iterable of batches, and any other loader | all of it | a part of its own, or nothing |

A loader that draws with replacement is refused, and so are data sets of different lengths; equal first batches give a
warning. `iter(loader)` is an iterable of batches, and so the rank's own part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from errbar._base.digest import digest_of
from errbar._base.progress import track
from errbar._distributed.team import Team
from errbar._model.batch import Batch, Form, Unpack, batches, count_batches, raw_batches
from errbar.errors import DataError

WHOLE, OWN, _SAMPLED = "a whole data set", "its own batches", "a DistributedSampler"


@dataclass(frozen=True, eq=False)
class Shard:
    """What this rank reads, and facts about it (plain values), by which the ranks detect mistakes."""

    data: Any
    kind: str
    facts: tuple[Any, ...] = ()


def opened(
    data: Any, unpack: Unpack | None, team: Team, *, title: str = "Reading", progress: bool = False
) -> Iterator[Batch]:
    """The batches of this rank, to be read within a step; the first one is read here. A collective call."""
    if team.is_alone:
        return stream_of(data, unpack, title=title, progress=progress)

    def begin() -> tuple[Iterator[Batch], Shard]:
        shard = _shard_of(data, team)
        stream = stream_of(shard.data, unpack, title=title, progress=progress and team.leads)
        first = next(stream, None)
        if shard.kind == OWN:
            shard = Shard(data, OWN, () if first is None else (digest_of((first.args, first.kwargs)),))
        return chain([] if first is None else [first], stream), shard

    stream, shard = team.together(begin)
    require_one_division(team.exchange((shard.kind, shard.facts)))
    return team.watched(stream)


def opened_raw(data: Any, team: Team, *, title: str, progress: bool = False) -> Iterator[Any]:
    """The batches of this rank as the data yield them, to be read within a step. A collective call."""
    if team.is_alone:
        return track(raw_batches(data), title, total=count_batches(data), enabled=progress)

    def begin() -> tuple[Iterator[Any], Shard]:
        shard = _shard_of(data, team)
        total = count_batches(shard.data)
        stream = track(raw_batches(shard.data), title, total=total, enabled=progress and team.leads)
        first = list(islice(stream, 1))
        if shard.kind == OWN:
            shard = Shard(data, OWN, tuple(digest_of([value]) for value in first))
        return chain(first, stream), shard

    stream, shard = team.together(begin)
    require_one_division(team.exchange((shard.kind, shard.facts)))
    return team.watched(stream)


@dataclass(frozen=True)
class FirstBatch:
    """A batch from which all ranks plan in the same way, and the size of the largest first batch of any rank."""

    batch: Batch
    size: int


def first_batch_of(first: Batch | None, team: Team) -> FirstBatch:
    """Two samples of the first rank that has any. A collective call.

    So a rank without data learns the layers and the classes, and all ranks make sums of the same form.
    """

    def described() -> tuple[int, bool] | None:
        return None if first is None else (len(first), _is_plain([*first.args, *first.kwargs.values()]))

    descriptions = team.exchange(team.together(described))
    ranks_with_data = [rank for rank, description in enumerate(descriptions) if description is not None]
    if not ranks_with_data:
        raise DataError("The data are empty: expected at least one batch.")
    source, size = ranks_with_data[0], max(description[0] for description in descriptions if description is not None)
    if descriptions[source][1]:

        def call() -> tuple[tuple[Any, ...], dict[str, Any], Form, Any] | None:
            if team.rank != source or first is None:
                return None
            # Cloned, because a slice is sent together with all that it is a slice of.
            few = first.rows(0, 2).map(lambda tensor: tensor.detach().cpu().clone())
            # Perhaps an argument of the model: see `Network.prepare`.
            own = torch.as_tensor(few.weights).detach().cpu().clone() if few.by_name else None
            return few.args, few.kwargs, few.form, own

        args, kwargs, form, own = team.broadcast(team.together(call), source)
        return FirstBatch(Batch(args, kwargs, form=form, weights=own, by_name=own is not None), size)
    if first is None or len(ranks_with_data) < team.size:
        empty = next(rank for rank in range(team.size) if rank not in ranks_with_data)
        raise DataError(
            f"Rank {empty} has no data, and cannot learn the layers from a batch of rank {source}, which holds more "
            "than tensors, numbers and text. Give each rank at least one batch, or use unpack= to pass plain arguments."
        )
    return FirstBatch(first, size)


def require_one_division(claims: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
    """Refuse, on all ranks alike, what does not divide one set of data; warn where it probably does not."""
    kinds = [kind for kind, _ in claims]
    for rank, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise DataError(
                f"The data of rank 0 are {kinds[0]}, those of rank {rank} are {kind}; expected the same kind on all "
                "ranks: the whole Dataset on each, or the rank's own batches, which may be none (an empty list)."
            )
    facts_of_ranks = [facts for _, facts in claims]
    if kinds[0] == WHOLE:
        _require_one_whole(facts_of_ranks)
    elif kinds[0] == _SAMPLED:
        _require_fitting_samplers(facts_of_ranks)
    else:
        digests = [facts[0] for facts in facts_of_ranks if facts]
        if len(set(digests)) < len(digests):
            warnings.warn(
                "Several ranks read the same first batch, so these data probably count more than once: an iterable of "
                "batches is taken as the rank's own part. Pass the Dataset or the DataLoader itself, which errbar "
                "divides over the ranks, or group=False to let each rank compute alone.",
                UserWarning,
                stacklevel=4,
            )


def _require_one_whole(facts: Sequence[tuple[Any, ...]]) -> None:
    for rank, (length, sample) in enumerate(facts):
        if length != facts[0][0]:
            raise DataError(
                f"Rank 0 has a data set of {facts[0][0]} samples, rank {rank} one of {length}; expected the whole data "
                "set on each rank, because errbar divides it. Pass data that are a rank's own part as batches, for "
                "example iter(loader)."
            )
        if sample != facts[0][1]:
            warnings.warn(
                f"The first sample of the data set is not the same on rank 0 and rank {rank}: errbar divides a data "
                "set over the ranks, so each must hold the whole of it. Pass data that are a rank's own part as "
                "batches, for example iter(loader). Ignore this if samples are augmented at random.",
                UserWarning,
                stacklevel=5,
            )
            return


def _require_fitting_samplers(facts: Sequence[tuple[Any, ...]]) -> None:
    parts: dict[int, int] = {}
    replicas = facts[0][1]
    for rank, (part, _, settings) in enumerate(facts):
        if settings != facts[0][2]:
            raise DataError(
                f"The DistributedSampler of rank {rank} has {settings}, that of rank 0 {facts[0][2]}; expected the "
                "same on all ranks, or their samples overlap. Set the same seed, and the same epoch by set_epoch."
            )
        if part in parts:
            raise DataError(
                f"The DistributedSamplers of ranks {parts[part]} and {rank} both take part {part}; expected a part of "
                "its own for each rank. Leave num_replicas= and rank= out, or pass those of the group."
            )
        parts[part] = rank
    if replicas > len(facts):
        raise DataError(
            f"The DistributedSamplers divide the data into {replicas} parts, and there are {len(facts)} ranks, so "
            f"{replicas - len(facts)} would not be read. Leave num_replicas= and rank= out, or pass those of the "
            "group; group=False lets each rank compute alone."
        )


def stream_of(data: Any, unpack: Unpack | None, *, title: str, progress: bool) -> Iterator[Batch]:
    """The batches that one process reads by itself."""
    data = _without_padding(data)
    stream = batches(data, unpack)
    return track(stream, title, total=count_batches(data)) if progress else stream


def _without_padding(data: Any) -> Any:
    """A loader with a DistributedSampler without its padding; other data as they are."""
    sampler = sampler_of(data)
    return data if not is_distributed(sampler) else _sampled(data, sampler).data


def _shard_of(data: Any, team: Team) -> Shard:
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        length = length_of(data)
        part = _part(range(length), team)
        return Shard(Subset(data, part) if part else [], WHOLE, (length, digest_of([data[0]]) if length else None))
    sampler = sampler_of(data)
    if sampler is None:
        return Shard(data, OWN)
    if is_distributed(sampler):
        return _sampled(data, sampler)
    kind = type(sampler)
    if kind is WeightedRandomSampler or (kind is RandomSampler and _draws_anew(sampler)):
        raise DataError(
            f"The DataLoader draws its samples at random ({kind.__name__} with replacement, or with num_samples), so "
            "ranks cannot share them. Pass the Dataset itself, a DistributedSampler, or group=False."
        )
    if kind is SubsetRandomSampler:
        return _divided(data, list(sampler.indices), team)
    if kind in (SequentialSampler, RandomSampler):
        return _divided(data, range(len(sampler)), team)
    return Shard(data, OWN)


def sampler_of(data: Any) -> Any:
    """The sampler of a DataLoader that reads a map-style data set in plain batches; None for all other data."""
    if not isinstance(data, DataLoader) or type(data).__iter__ is not DataLoader.__iter__:
        return None
    if isinstance(data.dataset, IterableDataset):
        return None
    if data.batch_sampler is None:
        return data.sampler
    return data.batch_sampler.sampler if type(data.batch_sampler) is BatchSampler else None


def is_distributed(sampler: Any) -> bool:
    """Whether it divides the data in the way of torch; a subclass may do anything."""
    return isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__


def _draws_anew(sampler: RandomSampler) -> bool:
    return bool(sampler.replacement) or sampler.num_samples != len(sampler.data_source)


def _sampled(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Shard:
    """The samples of the sampler up to where its padding begins.

    Sample k of this rank is number rank + k · num_replicas of the (shuffled) data set; numbers beyond its length are
    repetitions. With drop_last there are none.
    """
    length = len(sampler.dataset)  # type: ignore[arg-type]
    remaining_count = max(0, -(-(length - sampler.rank) // sampler.num_replicas))
    index_batches: list[Any] = []
    for batch in [list(sampler)] if loader.batch_sampler is None else loader.batch_sampler:
        if part := list(batch)[:remaining_count]:
            index_batches.append(part)
            remaining_count -= len(part)
    settings = f"num_replicas={sampler.num_replicas}, seed={sampler.seed}, epoch={sampler.epoch}, "
    settings += f"shuffle={sampler.shuffle}, drop_last={sampler.drop_last}, {length} samples"
    return Shard(reloaded(loader, index_batches), _SAMPLED, (sampler.rank, sampler.num_replicas, settings))


def _divided(loader: DataLoader[Any], indices: Sequence[int], team: Team) -> Shard:
    """A contiguous part of the samples, in the loader's batches; what drop_last drops is dropped beforehand."""
    sampler = loader.batch_sampler
    size = getattr(sampler, "batch_size", 1)
    if getattr(sampler, "drop_last", False):
        indices = indices[: len(indices) // size * size]
    part = list(_part(indices, team))
    digest = digest_of(
        (list(indices) if isinstance(indices, list) else None, loader.dataset[indices[0]] if indices else 0)
    )
    index_batches = (
        [part[start : start + size] for start in range(0, len(part), size)] if sampler is not None else [part]
    )
    return Shard(reloaded(loader, index_batches), WHOLE, (len(indices), digest))


def reloaded(loader: DataLoader[Any], index_batches: list[list[int]]) -> Any:
    """The same loader for these batches of samples; one without batches of its own reads them one by one."""
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    names += ["generator", "prefetch_factor"]
    options = {name: getattr(loader, name) for name in names}
    if not any(index_batches):
        return []
    if loader.batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None, sampler=list(chain(*index_batches)), **options)
    return DataLoader(loader.dataset, batch_sampler=index_batches, **options)


def _part(indices: Sequence[int], team: Team) -> Sequence[int]:
    count = len(indices)
    return indices[count * team.rank // team.size : count * (team.rank + 1) // team.size]


def length_of(data: Any) -> int:
    try:
        return len(data)
    except TypeError as error:
        raise DataError(
            f"The data set {type(data).__name__} has no length, so it cannot be divided over the ranks. Give it a "
            "__len__, or pass each rank its own batches."
        ) from error


def _is_plain(value: Any) -> bool:
    """Whether a value can be sent without code: tensors, numbers, text, and lists, tuples and dicts of these."""
    if type(value) in (list, tuple):
        return all(_is_plain(part) for part in value)
    if type(value) is dict:
        return all(_is_plain(part) for part in (*value, *value.values()))
    return value is None or type(value) in (Tensor, bool, int, float, str, bytes)
