"""The order in which data are read: what is read more than once has to come in the same order each time."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from errbar._model.batch import raw_batches


def in_order(data: Any) -> Any:
    """Data that can be read again in the same order: shuffled loaders in the order of their data set; iterators, and
    loaders with any other sampler, from memory."""
    if not isinstance(data, DataLoader):
        return data if isinstance(data, (Dataset, list, tuple)) else list(raw_batches(data))
    sampler = _own_sampler(data)
    if type(sampler) is SequentialSampler:
        return data
    if not _shuffles_all(sampler, data):
        return list(data)
    # A loader that was given its batch sampler has no batch size of its own.
    own = data if data.batch_sampler is None else data.batch_sampler
    return DataLoader(
        data.dataset,
        batch_size=own.batch_size,  # type: ignore[union-attr]
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        drop_last=own.drop_last,  # type: ignore[union-attr]
    )


def other_sampler(data: Any) -> Any:
    """The sampler of a loader that neither follows the order of its data set nor shuffles all of it, else None."""
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return None
    sampler = _own_sampler(data)
    return None if type(sampler) is SequentialSampler or _shuffles_all(sampler, data) else sampler


def _own_sampler(loader: DataLoader[Any]) -> Any:
    """What says which samples come when: with `batch_sampler=`, the `sampler` of the loader is not used."""
    batched = loader.batch_sampler
    if batched is None:
        return loader.sampler
    return batched.sampler if type(batched) is BatchSampler else batched


def _shuffles_all(sampler: Any, loader: DataLoader[Any]) -> bool:
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    try:
        return len(sampler) == len(sampler.data_source) == len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        return False
