"""Which inputs to label next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, SubsetRandomSampler

from errbar._base.checks import require_option, whole_number
from errbar._base.progress import track
from errbar._deciding.conditioned import Conditioned
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import require_samples, require_seed
from errbar._model.batch import Batch, Unpack, batches, count_batches, joined, leaves
from errbar._model.reading_order import in_order, other_sampler
from errbar._posterior.posterior import Posterior, require_posterior
from errbar._posterior.pushing import affordable_draws
from errbar.errors import ArgumentError, DataError

RULES = ("information", "mutual_information", "entropy", "margin", "random")
# Inputs whose gains are computed again at a time: the first of a choice, and the most.
_FIRST_TOGETHER, _MOST_TOGETHER = 32, 256
# The inputs with the largest bounds that are held, and their bytes.
_HELD_INPUTS, _HELD_BYTES = 2**13, 2**29


def acquire(
    posterior: Posterior,
    pool: Any,
    k: int,
    *,
    by: str = "information",
    samples: int = 1000,
    seed: int = 0,
    unpack: Unpack | None = None,
    progress: bool = False,
) -> Int[Tensor, "k"]:
    """The k inputs of `pool` to label next: their indices in the order of the data, the first choice first.

    Args:
        posterior: what is known so far.
        pool: inputs as a Dataset, a DataLoader or an iterable of batches; labels in it are ignored. It is read more
            than once: an iterator is held in memory, and a shuffled DataLoader is read in the order of its data set.
            One with a sampler of another kind is refused: pass a `torch.utils.data.Subset` of the data set.
        k: how many.
        by: "information" chooses one after the other the input whose label tells most about the parameters,
            ½ ln det(I + Λ^½ J P Jᵀ Λ^½), with P conditioned on those chosen before (`_deciding.conditioned`), so that
            a choice is not k copies of one doubt; without T, T_c and c. The others look at each input by itself:
            "mutual_information" of its label and the parameters (BALD), "entropy" of its PMF, "margin", the least
            difference between its two largest probabilities; or "random". Of several labels (`outputs="labels"`)
            all are bought together: the mutual information and the entropy are sums over the labels, and the margin
            is that of the label that is nearest to one half.
        samples: Monte Carlo draws of a prediction; as in `outlier_scores` fewer with more than 100 classes.
        seed: of those draws, or of the random choice.
        unpack: as in `Posterior.predict`.
        progress: show progress with the time left.

    What "information" takes beside the posterior and one batch: a number for each input, some inputs, and for each
    chosen one the n numbers of M−1 directions. Gains only fall while inputs are chosen, so those of earlier steps are
    bounds, and few are computed again.
    """
    require_posterior(posterior)
    posterior.information.task.require_inputs("acquire")
    require_option("by", by, RULES)
    count = whole_number(k)
    if count is None or count < 1:
        raise ArgumentError(f"k is {k!r}; expected a whole number of one or more, of inputs to label.")
    draws, seed = affordable_draws(posterior.information.n_classes, require_samples(samples)), require_seed(seed)
    own_unpack = unpack or posterior.unpack
    _require_order(pool)
    size = _known_size(pool)
    if size is not None:
        _require_enough(count, size)
    data = in_order(pool)

    def stream(title: str) -> Iterator[Batch]:
        read = batches(data, own_unpack, quiet=True)
        return track(read, title, total=count_batches(data), enabled=progress)

    if by == "random":
        size = sum(map(len, stream("Counting"))) if size is None else size
        _require_enough(count, size)
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:count]
    if by == "information":
        return _by_information(posterior, stream, count)
    scores = [_scores(posterior.predict(_unlabelled(batch), draws, seed), by).cpu() for batch in stream("Scoring")]
    whole = torch.cat(scores) if scores else torch.empty(0)
    _require_enough(count, len(whole))
    return whole.argsort(descending=True, stable=True)[:count]


def _require_order(pool: Any) -> None:
    """Refuse a loader whose samples come in an order of which indices would say nothing."""
    sampler = other_sampler(pool)
    if sampler is not None:
        subset = "torch.utils.data.Subset(dataset, indices)"
        advice = (
            f"{subset} instead" if isinstance(sampler, SubsetRandomSampler) else f"the data set itself, or {subset}"
        )
        raise DataError(
            f"The pool is a DataLoader with a {type(sampler).__name__}; expected one that reads its data set in order "
            f"or shuffles all of it, because the choice is by the indices of the samples. Pass {advice}."
        )


def _known_size(pool: Any) -> int | None:
    try:
        return len(pool) if isinstance(pool, Dataset) else None  # type: ignore[arg-type]
    except TypeError:
        return None


def _require_enough(k: int, size: int) -> None:
    if size == 0:
        raise DataError("The pool is empty: expected at least one input.")
    if k > size:
        raise ArgumentError(f"k is {k:,}, and the pool holds {size:,} inputs; expected no more than it holds.")


def _unlabelled(batch: Batch) -> Batch:
    return replace(batch, labels=None)


def _scores(prediction: Prediction, by: str) -> Float[Tensor, "B"]:
    """Higher is more worth a label."""
    has_gauge = prediction.sampler.kind.has_gauge
    if by in ("mutual_information", "entropy"):
        doubt: Tensor = getattr(prediction, by)
        return doubt if has_gauge else doubt.sum(1)
    if not has_gauge:
        return -(2 * prediction.pmf - 1).abs().amin(1)
    first, second = prediction.pmf.topk(2, dim=1).values.unbind(1)
    return second - first


def _by_information(posterior: Posterior, stream: Callable[[str], Iterator[Batch]], k: int) -> Int[Tensor, "k"]:
    """Greedy, and lazy: a gain that was computed when fewer were chosen is a bound of what it is now."""
    conditioned = Conditioned(posterior, k)
    gains, most = [], _HELD_INPUTS
    for batch in stream("Scoring"):
        gains.append(conditioned.gains(_unlabelled(batch)).cpu())
        each = sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors()) / len(batch)
        most = min(most, max(_MOST_TOGETHER, int(_HELD_BYTES / max(each, 1.0))))
    _require_enough(k, sum(map(len, gains)))
    pool = _Pool(torch.cat(gains).numpy(), stream, most)
    chosen: list[int] = []
    while len(chosen) < k:
        index = pool.best(conditioned)
        chosen.append(index)
        if len(chosen) < k:
            conditioned.add(pool.inputs[index])
        pool.remove(index)
    return torch.tensor(chosen)


class _Pool:
    """Bounds of the gains of all inputs, and those inputs with the largest bounds; private to one choice."""

    def __init__(self, bounds: np.ndarray[Any, Any], stream: Callable[[str], Iterator[Batch]], most: int) -> None:
        self.bounds, self.stream, self.most = bounds, stream, most
        self.fresh = np.ones(len(bounds), dtype=bool)
        self.inputs: dict[int, Batch] = {}
        self.held = np.empty(0, dtype=np.int64)
        self.others = np.inf

    def best(self, conditioned: Conditioned) -> int:
        """The input with the largest gain; of equal ones the first."""
        together = _FIRST_TOGETHER
        while True:
            own = self.bounds[self.held]
            if not len(own) or own.max() < self.others:
                self._hold()
                continue
            index = int(self.held[own.argmax()])
            if self.fresh[index]:
                return index
            fresh = own[self.fresh[self.held]]
            floor = fresh.max() if len(fresh) else -np.inf
            stale = self.held[~self.fresh[self.held] & (own >= floor)]
            some = stale[np.argsort(-self.bounds[stale], kind="stable")][:together]
            # What rounding adds to a gain that cannot have grown is not believed.
            gains = _gains_of([self.inputs[i] for i in some.tolist()], conditioned)
            self.bounds[some] = np.minimum(gains, self.bounds[some])
            self.fresh[some] = True
            together = min(2 * together, _MOST_TOGETHER)

    def remove(self, index: int) -> None:
        """An input was chosen: it leaves the pool, and every other gain is a bound from now on."""
        del self.inputs[index]
        self.bounds[index] = -np.inf
        self.fresh[:] = False
        self.held = self.held[self.held != index]

    def _hold(self) -> None:
        """Hold those inputs that have the largest bounds now, in order; a pass over the data for what is missing."""
        order = np.argsort(-self.bounds, kind="stable")
        order = order[: min(self.most, int((self.bounds > -np.inf).sum()))]
        self.others = self.bounds[np.setdiff1d(np.arange(len(self.bounds)), order)].max(initial=-np.inf)
        self.held = np.sort(order)
        kept = set(self.held.tolist())
        self.inputs = {index: own for index, own in self.inputs.items() if index in kept}
        start = 0
        for batch in self.stream("Reading"):
            stop = start + len(batch)
            for index in self.held[np.searchsorted(self.held, start) : np.searchsorted(self.held, stop)].tolist():
                if index not in self.inputs:
                    self.inputs[index] = _one(batch, index - start)
            start = stop


def _one(batch: Batch, row: int) -> Batch:
    """One input of a batch, in memory of its own: a view would hold the whole batch."""
    return _unlabelled(batch).rows(row, row + 1).map(torch.clone)


def _gains_of(inputs: Sequence[Batch], conditioned: Conditioned) -> np.ndarray[Any, Any]:
    """The gains of single inputs, together where they have the same shape: sequences may be padded differently."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for position, own in enumerate(inputs):
        groups.setdefault(tuple(map(_shape, leaves((own.args, own.kwargs)))), []).append(position)
    gains = np.empty(len(inputs))
    for positions in groups.values():
        gains[positions] = conditioned.gains(joined([inputs[position] for position in positions])).cpu().numpy()
    return gains


def _shape(leaf: Any) -> Any:
    return "packed" if isinstance(leaf, PackedSequence) else tuple(leaf.shape)
