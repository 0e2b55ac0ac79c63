"""Which samples were in the data, in few numbers: enough to notice held-out data that are training data.

Each sample has a key, a hash of its inputs. Of the keys of all samples the smallest are kept, with how often each came:
all that are below `limit`. The keys of a hash are even numbers, so those kept are a random choice of the samples, and
the same choice in any other data. So of held-out samples with a key below the limit, the share that is among the kept
ones estimates the share of all held-out samples that were in the data. Keys do not depend on batches, ranks or their
order, and add up by union.

A key says nothing of its sample to whoever does not have the sample; whoever does can tell whether it was in the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from errbar._curvature.scores import mask_of, sample_keys
from errbar._model.batch import Batch

# Keys kept: of 50,000 training and 5,000 held-out samples about 100 can be compared.
MOST_KEYS = 1024
# Keys are whole numbers of this many bits, which every reader of JSON holds exactly.
KEY_BITS = 53
# Numbers of a sample that its key depends on: of more, some that are evenly spaced.
_MOST_NUMBERS = 1024
# Keys that wait on the device before the smallest of them are chosen.
_WAITING = 2**16


@dataclass(frozen=True)
class Seen:
    """The keys of the data below `limit`, and how many samples have each."""

    counts: Mapping[int, int] = field(default_factory=dict)
    limit: int = 2**KEY_BITS

    def __add__(self, other: Seen) -> Seen:
        counts = Counter(self.counts)
        counts.update(other.counts)
        return _smallest(counts, min(self.limit, other.limit))

    def __sub__(self, other: Seen) -> Seen:
        """Without the samples of `other`: what is forgotten leaves no key behind."""
        counts = Counter(self.counts)
        counts.subtract(other.counts)
        return Seen({key: count for key, count in sorted(counts.items()) if count > 0}, self.limit)

    def is_repetitive(self) -> bool:
        """Whether more than a tenth of the samples equal others: then samples of new data may equal some as well."""
        return len(self.counts) < 0.9 * sum(self.counts.values())


class SeenSoFar:
    """Adds up the keys of prepared batches; private to one pass over the data."""

    def __init__(self) -> None:
        self._total: Seen | None = Seen()
        self._waiting: list[Tensor] = []

    def add(self, batch: Batch) -> None:
        keys = keys_of(batch)
        if keys is None or self._total is None:
            self._total = None
            return
        self._waiting.append(keys)
        if sum(map(len, self._waiting)) >= _WAITING:
            self._total += self._compressed()

    def finish(self) -> Seen | None:
        """None where the inputs are of a kind that has no keys."""
        return None if self._total is None else self._total + self._compressed()

    def _compressed(self) -> Seen:
        if not self._waiting:
            return Seen()
        keys, counts = torch.cat(self._waiting).unique(sorted=True, return_counts=True)
        self._waiting = []
        some = slice(0, MOST_KEYS + 1)
        return _smallest(Counter(dict(zip(keys[some].tolist(), counts[some].tolist(), strict=True))), 2**KEY_BITS)


def keys_of(batch: Batch) -> Int[Tensor, "B"] | None:
    """The keys of the samples of a prepared batch; None for tensors that are not plain arrays."""
    if any(tensor.layout != torch.strided or tensor.is_complex() for tensor in batch.tensors()):
        return None
    mask = mask_of(batch)
    keys = sample_keys(batch.map(lambda tensor: _thinned(tensor, mask)))
    return keys.bitwise_and(2**KEY_BITS - 1)


def _thinned(tensor: Tensor, mask: Tensor | None) -> Tensor:
    size = tensor[0].numel() if tensor.ndim > 1 and len(tensor) else 0
    # What a mask is about keeps its shape.
    is_masked = mask is not None and tensor.shape[: mask.ndim] == mask.shape
    return tensor if is_masked or size <= _MOST_NUMBERS else tensor.flatten(1)[:, :: -(-size // _MOST_NUMBERS)]


def _smallest(counts: Mapping[int, int], limit: int) -> Seen:
    keys = sorted(key for key in counts if key < limit)
    if len(keys) > MOST_KEYS:
        limit = keys[MOST_KEYS]
    return Seen({key: counts[key] for key in keys[:MOST_KEYS]}, limit)
