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
# Activations of one input and direction, where no pass has told what they take: a guess on the safe side.
_UNKNOWN_ACTIVATIONS = 2**24

# Draws whose spread is added at a time, so that no second copy of all samples is made.
_SPREAD_DRAWS = 64


def pushing_is_cheaper(task: Task, samples: int) -> bool:
    """Whether K draws pushed forward take less time than P^g, which takes a backward pass for each class.

    Not where all that is selected is a layer that returns the logits: there P^g takes no backward pass at all.
    """
    return draws_are_quicker(task.n_classes, samples) and not all(_takes_no_pass(route) for route in task.routes)


def _takes_no_pass(route: Route | None) -> bool:
    if route is None:
        return False
    by_layer = route.by_layer
    return route.identity or (by_layer is not None and not by_layer.outer_size and not len(by_layer.rest_spans))


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


def contrast_variance_of(deviations: Float[Tensor, "B M K"]) -> Float[Tensor, "B"]:
    """The mean variance of the M−1 contrasts, (1/K) Σ_k |d⁽ᵏ⁾ − its mean over the classes|²/(M−1); E d = 0 is known."""
    count = deviations.shape[2]
    squares = sum(
        (part - part.mean(1, keepdim=True)).square().sum((1, 2), dtype=torch.float64)
        for part in deviations.split(_SPREAD_DRAWS, 2)
    )
    assert isinstance(squares, Tensor)
    return squares / (count * (deviations.shape[1] - 1))


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
