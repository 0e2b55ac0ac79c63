"""Samples of the linearised logits by draws of the parameters that are pushed forward: J δ, δ ~ N(0, P).

They have the distribution N(0, P^g) that the delta method gives, for all classes at once, and nothing of size M × M is
made. The K draws are the same for all inputs, and are made again for each batch: never all of them are held.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.checks import whole_number
from errbar._base.counter import normal_row
from errbar._base.memory import require_memory
from errbar._curvature.structure import Factor
from errbar._curvature.task import Task
from errbar._curvature.workload import PUSHED_BYTES, draws_are_quicker
from errbar._derivative.forward import pushed_forward
from errbar._derivative.route import Route
from errbar._model.batch import Batch
from errbar.errors import ArgumentError

# Bytes of the derivatives of the widest output of a module. On a CPU they should stay in the cache, and larger ones
# take longer to allocate than to compute; with smaller ones fewer draws share the pass of the network itself.
_WIDEST_BYTES = {"cpu": 2**24, "cuda": 2**30}
_LEAST_TOGETHER = 8
# Up to so many classes P^g of an input is small, and all samples are taken.
FEW_CLASSES = 100
# With more: numbers in the draws of the logits of one input that are kept, and the least number of draws.
_KEPT_NUMBERS, _LEAST_DRAWS = 100_000, 100
# The widest output of one input, where no pass has told what it takes: a guess on the safe side.
_UNKNOWN_WIDEST = 2**22

# Draws whose spread is added at a time, so that no second copy of all samples is made.
_SPREAD_DRAWS = 64


def affordable_draws(classes: int, samples: int) -> int:
    """How many of so many samples to keep of the logits of each input, where those of many inputs are held at a time.

    All of them for up to 100 classes; of M classes 100,000/M, and at least 100: the Monte Carlo error of a probability
    f is then √(f (1 − f)/100) at most, and that of a mean over many inputs far below.
    """
    return samples if classes <= FEW_CLASSES else min(samples, max(_LEAST_DRAWS, _KEPT_NUMBERS // classes))


def held_draws(task: Task, samples: int) -> int:
    """`affordable_draws` of a task: as few as of a thousand classes where thousands of positions average."""
    if task.positions is not None:
        return min(samples, _LEAST_DRAWS)
    return affordable_draws(task.n_classes, samples)


def keeps_draws(task: Task, samples: int) -> bool:
    """Whether K draws, pushed forward, take the place of P^g: where they take less time.

    P^g takes a backward pass for each class; but none at all, and so it stays, where all that is selected is a layer
    that returns the logits.
    """
    if task.positions is not None:
        return task.positions.head is None
    return draws_are_quicker(task.n_classes, samples) and not all(_takes_no_pass(route) for route in task.routes)


def _takes_no_pass(route: Route | None) -> bool:
    if route is None:
        return False
    by_layer = route.by_layer
    return route.identity or (by_layer is not None and not by_layer.outer_size and not len(by_layer.rest_spans))


def pushed_draws(task: Task, samples: int) -> int:
    """How many samples to take of each of many inputs: all of them by P^g, as many as are affordable by draws."""
    few = held_draws(task, samples)
    return few if keeps_draws(task, few) else samples


def require_room(task: Task, held: int, inputs: int, samples: int) -> None:
    """Refuse to draw the logits of more inputs than memory holds, beside a copy of those that are `held` already.

    Nothing is refused where P^g takes the place of draws.
    """
    if not keeps_draws(task, samples):
        return
    require_memory(
        (held + 2 * inputs) * task.n_classes * samples * task.network.dtype.itemsize,
        task.network.device,
        what=f"Holding {samples:,} draws of {task.n_classes:,} logits for {held + inputs:,} inputs or more",
        instead="Use fewer inputs, or fewer samples.",
    )


def require_top(top: object, classes: int) -> int:
    number = whole_number(top)
    if number is None or not 2 <= number <= classes:
        raise ArgumentError(f"top is {top!r}; expected a whole number of classes, from 2 to {classes}.")
    return number


def pushed_deviations(task: Task, factor: Factor, batch: Batch, samples: int, seed: int) -> Float[Tensor, "B M K"]:
    """J δ of each input of a prepared batch, for K draws δ of the parameters."""
    network, selection = task.network, task.selection
    require_memory(
        2 * len(batch) * task.n_classes * samples * network.dtype.itemsize,
        network.device,
        what=f"{samples:,} samples of {task.n_classes:,} probabilities for {len(batch):,} inputs",
        instead="Ask for fewer samples, or for fewer inputs at a time.",
    )
    deviations: Tensor | None = None
    first = 0
    rows, together = _at_a_time(task, samples)
    for normal in _normal_rows(samples, seed, _drawn_at_a_time(task, together), task):
        directions = factor.sample(normal)
        del normal
        for few in directions.split(together):
            start = 0
            for part in batch.parts(rows):
                pushed = pushed_forward(network, selection, part, few)
                pushed = pushed if network.keeps_graph else pushed.detach()
                if deviations is None:
                    deviations = pushed.new_empty(len(batch), pushed.shape[2], samples)
                where = slice(start, start + pushed.shape[1]), slice(None), slice(first, first + len(few))
                deviations[where] = pushed.permute(1, 2, 0)
                start += pushed.shape[1]
            first += len(few)
    assert deviations is not None
    return deviations


def _drawn_at_a_time(task: Task, together: int) -> int:
    """Draws of the parameters that are held at a time: some times as many as go through the network together."""
    limit = PUSHED_BYTES.get(task.network.device.type, PUSHED_BYTES["cpu"])
    most = max(1, limit // (8 * task.selection.n_parameters))
    return most - most % together if most > together else most


def _at_a_time(task: Task, samples: int) -> tuple[int, int]:
    """How many inputs, and how many draws, go through the network at a time.

    The network itself runs once for all draws that go together, so these are some at least.
    """
    kind = task.network.device.type
    limit = _WIDEST_BYTES.get(kind, _WIDEST_BYTES["cpu"])
    widest = _UNKNOWN_WIDEST if task.layout is None else max(1, task.layout.widest_bytes)
    draws = min(samples, max(_LEAST_TOGETHER, limit // widest))
    return max(1, limit // (draws * widest)), draws


def _normal_rows(samples: int, seed: int, at_a_time: int, task: Task) -> Iterator[Float[Tensor, "k n"]]:
    """Standard normal rows, the same whatever the number that is made at a time, and wherever.

    Products in float64 take twice the time, and a network in float32 sees no difference.
    """
    n, device = task.selection.n_parameters, task.network.device
    for first in range(0, samples, at_a_time):
        normal = torch.empty(min(at_a_time, samples - first), n, dtype=task.dtype, device=device)
        for index, row in enumerate(normal):
            row.copy_(normal_row(seed, first + index, n, device))
        yield normal
        del normal
