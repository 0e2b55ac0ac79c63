"""Data that are read more than once come in the same order each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from errbar._model.reading_order import in_order


def _ids(loader: Any) -> list[list[float]]:
    return [batch[0].flatten().tolist() for batch in loader]


DATA = TensorDataset(torch.arange(7.0)[:, None])
SAMPLED: dict[str, dict[str, Any]] = {
    "shuffled": {"batch_size": 3, "shuffle": True},
    "of batches": {"batch_sampler": BatchSampler(RandomSampler(DATA), 3, drop_last=False)},
    "one by one": {"batch_size": None, "shuffle": True},
    "of a part": {"batch_size": 3, "sampler": SubsetRandomSampler([5, 1, 4])},
    "weighted": {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 7, 7), 3, drop_last=True)},
    "with replacement": {"batch_size": 3, "sampler": RandomSampler(DATA, replacement=True)},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_what_is_in_order_is_read_in_the_same_order_again(name: str) -> None:
    loader = DataLoader(DATA, **SAMPLED[name])
    ordered = in_order(loader)
    assert _ids(ordered) == _ids(ordered)
    if name in ("shuffled", "of batches"):
        assert _ids(ordered) == [[0, 1, 2], [3, 4, 5], [6]]
        assert not isinstance(ordered, list)
    if name == "of a part":
        assert sorted(_ids(ordered)[0]) == [1, 4, 5]
