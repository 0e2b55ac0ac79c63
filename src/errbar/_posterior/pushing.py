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

# Outputs as large as the widest that are held at a time: of a layer, of its tangent, and of what they are made from.
_LIVE_OUTPUTS = 6
# Up to so many classes P^g of an input is small, and all samples are taken.
FEW_CLASSES = 100
# With more: numbers in the draws of the logits of one input that are kept, and the least number of draws.
_KEPT_NUMBERS, _LEAST_DRAWS = 100_000, 100
# Activations of one input and direction, where no pass has told what they take: a guess on the safe side.
_UNKNOWN_ACTIVATIONS = 2**24

# Draws whose spread is added at a time, so that no second copy of all samples is made.
_SPREAD_DRAWS = 64


def affordable_draws(classes: int, samples: int) -> int:
    """How many of so many samples to keep of the logits of each input, where those of many inputs are held at a time.

    All of them for up to 100 classes; of M classes 100,000/M, and at least 100: the Monte Carlo error of a probability
    f is then √(f (1 − f)/100) at most, and that of a mean over many inputs far below.
    """
    return samples if classes <= FEW_CLASSES else min(samples, max(_LEAST_DRAWS, _KEPT_NUMBERS // classes))


def keeps_draws(task: Task, samples: int) -> bool:
    """Whether K draws, pushed forward, take the place of P^g: where they take less time.

    P^g takes a backward pass for each class. Not where all that is selected is a layer that returns the logits: there
    P^g takes no backward pass at all.
    """
    return draws_are_quicker(task.n_classes, samples) and not all(_takes_no_pass(route) for route in task.routes)


def _takes_no_pass(route: Route | None) -> bool:
    if route is None:
        return False
    by_layer = route.by_layer
    return route.identity or (by_layer is not None and not by_layer.outer_size and not len(by_layer.rest_spans))


def pushed_draws(task: Task, samples: int) -> int:
    """How many samples to take of each of many inputs: all of them by P^g, as many as are affordable by draws."""
    few = affordable_draws(task.n_classes, samples)
    return few if keeps_draws(task, few) else samples


def require_room(inputs: int, held: int, classes: int, samples: int, like: Tensor) -> None:
    """Refuse draws of the logits of more inputs than memory holds, beside a copy of those `held` so far."""
    require_memory(
        (held + 2 * inputs) * classes * samples * like.element_size(),
        like.device,
        what=f"Holding {samples:,} draws of {classes:,} logits for {held + inputs:,} inputs",
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
    at_a_time = _draws_at_a_time(task, len(batch))
    for normal in _normal_rows(samples, selection.n_parameters, seed, at_a_time, network.device):
        directions = factor.sample(normal)
        pushed = pushed_forward(network, selection, batch, directions).detach()
        if deviations is None:
            deviations = pushed.new_empty(*pushed.shape[1:], samples)
        deviations[..., first : first + len(pushed)] = pushed.permute(1, 2, 0)
        first += len(pushed)
    assert deviations is not None
    return deviations


def _draws_at_a_time(task: Task, size: int) -> int:
    device = task.network.device
    limit = PUSHED_BYTES.get(device.type, PUSHED_BYTES["cpu"])
    activations = _UNKNOWN_ACTIVATIONS
    if task.layout is not None:
        activations = _LIVE_OUTPUTS * task.layout.widest_bytes
    return max(1, min(limit // (8 * task.selection.n_parameters), limit // max(1, size * activations)))


def _normal_rows(
    samples: int, n: int, seed: int, at_a_time: int, device: torch.device
) -> Iterator[Float[Tensor, "k n"]]:
    """Standard normal rows, the same whatever the number that is made at a time, and wherever."""
    for first in range(0, samples, at_a_time):
        rows = range(first, min(first + at_a_time, samples))
        yield torch.stack([normal_row(seed, row, n, device) for row in rows])
