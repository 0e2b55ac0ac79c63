"""Parts of the held-out data for cross-validation; what belongs together stays in one part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.checks import whole_number
from errbar._distributed.shards import opened
from errbar._distributed.team import Team
from errbar._model.batch import Batch, Unpack, with_raw
from errbar.errors import ArgumentError, DataError

Groups = Sequence[Any] | Callable[[Any], Sequence[Any]]


def require_folds(folds: object) -> int:
    number = whole_number(folds)
    if number is None or number < 2:
        raise ArgumentError(f"folds is {folds!r}; expected a whole number of 2 or more.")
    return number


def group_numbers(values: Sequence[Any], count: int) -> Int[Tensor, "N"]:
    """0, 1, … for values that are equal or not, in the order in which they appear.

    >>> group_numbers(["a", "b", "a"], 3).tolist()
    [0, 1, 0]
    """
    plain = _listed(values)
    if len(plain) != count:
        raise DataError(f"groups has {len(plain)} values; expected one for each of the {count} held-out samples.")
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in plain])


def read_folds(
    team: Team, held_out: Any, unpack: Unpack | None, groups: Groups | None, folds: int, seed: int
) -> tuple[Int[Tensor, "N"], list[Int[Tensor, "n"]]]:
    """The group of each held-out sample, and the rows of each fold, from one look at the batches.

    Labels must be there; they are checked later, with the classes. A collective call.
    """
    if not team.is_alone and groups is not None and not callable(groups):
        raise ArgumentError(
            "groups is a list of values, and several processes divide the held-out data; expected a function from "
            "a batch to the values of its samples."
        )
    own: list[Any] = []
    size = 0
    for value, batch in _raw_batches(team, held_out, unpack):
        if batch.labels is None:
            raise DataError(
                "The held-out data have no labels; expected batches (x, labels): cross-validation needs them."
            )
        size += len(batch)
        if callable(groups):
            own.extend(_listed(groups(value)))
    # In the order in which the held-out inputs of all ranks are gathered.
    parts = team.exchange((size, own))
    count = sum(part for part, _ in parts)
    if count == 0:
        raise DataError("The held-out data are empty: expected at least one batch with labels.")
    values: Sequence[Any] = range(count) if groups is None else groups if not callable(groups) else ()
    if callable(groups):
        values = [value for _, part in parts for value in part]
    numbers = group_numbers(values, count)
    return numbers, divided(numbers, folds, seed)


def _raw_batches(team: Team, held_out: Any, unpack: Unpack | None) -> Iterator[tuple[Any, Batch]]:
    """The batches as `groups` takes them, and as they are read."""
    if team.is_alone:
        yield from with_raw(held_out, unpack)
        return
    for batch in opened(held_out, unpack, team):
        yield (*batch.args, batch.labels), batch


def _listed(values: Any) -> list[Any]:
    plain = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(plain, str) or not isinstance(plain, Iterable):
        raise ArgumentError(
            f"groups is or returns {values!r}; expected one value for each held-out sample, or a function from a batch "
            "to the values of its samples."
        )
    return list(plain)


def divided(groups: Int[Tensor, "N"], folds: int, seed: int) -> list[Int[Tensor, "n"]]:
    """The rows of each fold: whole groups, at random, each to the fold with the fewest rows so far."""
    count = int(groups.max()) + 1 if len(groups) else 0
    if count < folds:
        of_one = count == len(groups)
        what = "held-out samples" if of_one else "groups of held-out samples"
        alone = "There is 1 held-out sample" if of_one else "All held-out samples are one group"
        start = alone if count == 1 else f"There are {count} {what}"
        raise DataError(
            f"{start} for folds={folds}; expected at least one for each fold. Give more held-out data or fewer folds."
        )
    sizes = torch.bincount(groups, minlength=count).tolist()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    # The large ones first, so that the folds come out nearly equal; in random order among equals.
    order.sort(key=lambda group: -sizes[group])
    filled, fold_of = [0] * folds, torch.empty(count, dtype=torch.long)
    for group in order:
        fold = min(range(folds), key=filled.__getitem__)
        fold_of[group] = fold
        filled[fold] += sizes[group]
    return [torch.nonzero(fold_of[groups] == fold)[:, 0] for fold in range(folds)]


def standard_error(values: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> float:
    """Of the mean of values that are independent between groups but not within: √(Σ_g (Σ_{n∈g} (v_n − v̄))²)/N, with
    the correction G/(G − 1) for G groups."""
    deviations = (values - values.mean()).double()
    sums = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, deviations)
    count = len(sums)
    return math.sqrt(float(sums.square().sum()) * count / max(count - 1, 1)) / len(values)
