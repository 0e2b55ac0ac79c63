"""Which structure fits into memory: the choice of `structure="auto"`, and a refusal that names what would fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from errbar._base.memory import available_bytes, readable, usable_bytes
from errbar._curvature.layout import Layout
from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._curvature.mixture import described_structure, is_mixture
from errbar._curvature.registry import faithfulness, structure_called, structure_names
from errbar._curvature.structure import Structure, planned_cost
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload
from errbar._model.selection import Selection
from errbar._planning.mixing import mixture_that_fits
from errbar.errors import SizeError, StructureNotice


def structure_that_fits(task: Task, rank: int) -> str:
    """The choice of `structure="auto"`: the most faithful that fits into memory, with a notice if it is not exact."""
    device = task.network.device
    usable, work = usable_bytes(device), _workload(task, task.selection, rank)
    costs = {name: planned_cost(structure_called(name), work) for name in structure_names()}
    fitting = [name for name, cost in costs.items() if cost.peak_bytes <= usable]
    mixture = mixture_that_fits(work, _layout(task), usable)
    structure = min([*fitting, mixture] if mixture else fitting, key=faithfulness, default=None)
    if structure is None:
        least = min(costs, key=lambda name: costs[name].peak_bytes)
        raise _refusal(task, least, rank, "No structure fits: even ")
    if structure == mixture or not costs[structure].exact:
        choice = described_structure(structure) if structure == mixture else f"'{structure}'"
        warnings.warn(
            f"structure='auto' chose {choice}, which is not exact: the exact covariance of "
            f"{task.selection.n_parameters:,} parameters would take {readable(costs['dense'].peak_bytes)}, and "
            f"{readable(available_bytes(device))} are available. Select fewer layers for the exact one, or name the "
            "structure to silence this.",
            StructureNotice,
            stacklevel=3,
        )
    return structure


def require_fits(task: Task, structure: Structure) -> None:
    """Refuse what would not fit, before anything large is allocated.

    What `structure="auto"` chose a moment ago has a tenth to spare, so that others who take memory in between do not
    turn its choice into a refusal. A task from a file has no layout, but then sums of that size are in memory already.
    """
    if task.layout is None:
        return
    rank = task.rank if task.route is None else DEFAULT_RANK
    peak = planned_cost(structure, _workload(task, task.selection, rank)).peak_bytes
    if peak > available_bytes(task.network.device):
        raise _refusal(task, task.structure, rank, "")


def cost_of(task: Task) -> Cost | None:
    """What the structure of a task costs; None for a task from a file, which has no layout."""
    if task.layout is None:
        return None
    return planned_cost(structure_called(task.structure), _workload(task, task.selection, task.rank))


def _workload(task: Task, selection: Selection, rank: int) -> Workload:
    scores = 0 if task.scores is None else task.scores.draws
    sizes: dict[str, Any] = {"batch": task.batch_size, "fisher": task.fisher_form, "dtype": task.dtype, "rank": rank}
    if task.positions is not None and task.positions.head is None:
        # A prediction holds its draws of all positions, of as many inputs as it is asked for: it refuses by itself.
        sizes["draws"] = 1
    return _layout(task).workload(selection, **sizes, scores=scores)


def _layout(task: Task) -> Layout:
    assert task.layout is not None
    return task.layout


def _refusal(task: Task, name: str, rank: int, start: str) -> SizeError:
    """What does not fit, the best other structure for the same parameters, and the most layers for which it fits."""
    device = task.network.device
    usable = usable_bytes(device)

    def peak(name: str, selection: Selection) -> int:
        return planned_cost(structure_called(name), _workload(task, selection, rank)).peak_bytes

    other = next((n for n in structure_names() if n != name and peak(n, task.selection) <= usable), None)
    advice = [f"structure='{other}' ({readable(peak(other, task.selection))})"] if other else []
    mixture = mixture_that_fits(_workload(task, task.selection, rank), _layout(task), usable)
    if mixture is not None:
        other = "auto"
        advice = [
            f"structure='auto', which takes {described_structure(mixture)} ({readable(peak(mixture, task.selection))})"
        ]
    # A mixture is about the layers that it names.
    layers = 0 if is_mixture(name) else _most_layers(_layout(task), lambda last: peak(name, last) <= usable)
    advice += [f"last_layers={layers} with structure='{name}'"] if layers else []
    instead = "no other structure and no number of layers fits either, so use a machine with more memory"
    if advice:
        instead = f"what fits is {' or '.join(advice)}"
    return SizeError(
        f"{start}structure='{name}' of {task.selection.n_parameters:,} parameters needs "
        f"{readable(peak(name, task.selection))} on {device}, and {readable(available_bytes(device))} are available; "
        f"{instead}.",
        arguments={"structure": (name, other), "last_layers": layers},
    )


def _most_layers(layout: Layout, fits: Callable[[Selection], bool]) -> int:
    """The largest r, by bisection: more layers never cost less."""
    low, high = 0, layout.n_layers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(layout.last(middle)) else (low, middle - 1)
    return low
