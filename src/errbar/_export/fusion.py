"""A fused classifier as one file that predicts without errbar: all networks in one graph, fused by its formula."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from errbar._curvature.structure import Factor
from errbar._curvature.task import Task
from errbar._distributions.calibration import Calibration
from errbar._distributions.sampling import standard_normal
from errbar._export.chain import named_inputs
from errbar._export.graph import Draws, FusedGraph, PredictionGraph, require_few_classes
from errbar._export.write import (
    ExportRequest,
    WorkedExample,
    described_request,
    described_task,
    gaussian_of,
    write_graph,
)
from errbar._model.batch import Batch
from errbar.errors import ExportError
from errbar.version import __version__


@dataclass(frozen=True, eq=False)
class Member:
    """A network of the fusion: its posterior, and the example as it takes it; a and s."""

    task: Task
    factor: Factor
    calibration: Calibration
    batch: Batch
    scale: float
    discrepancy: float


def shared_inputs(batches: Sequence[Batch]) -> Batch:
    """The inputs of the graph where all networks see the same: those of the first."""
    first = named_inputs(batches[0])
    for c, batch in enumerate(batches):
        own = named_inputs(batch)
        if list(own) != list(first) or any(own[name].shape != first[name].shape for name in first):
            raise ExportError(
                f"Network {c} takes other inputs from the example than network 0; expected the same for all, or "
                "each=[x_1, ...] with an example for each network."
            )
    return batches[0]


def separate_inputs(batches: Sequence[Batch]) -> Batch:
    """The inputs of the graph where each network sees its own, called network_0_x, network_1_x and so on."""
    named = {
        f"network_{c}_{name}": value for c, batch in enumerate(batches) for name, value in named_inputs(batch).items()
    }
    return Batch((), named)


def write_fused_export(
    path: str | os.PathLike[str],
    members: Sequence[Member],
    examples: Sequence[WorkedExample],
    request: ExportRequest,
    *,
    shared: bool,
) -> None:
    """Make the graph of all networks, compare it with what `predict` says about the examples, and write the file.

    `shared` says whether all networks take the same inputs. `calibration` of the request has T and q.
    """

    def make() -> PredictionGraph:
        classes = members[0].task.n_classes
        require_few_classes(classes)
        networks = [gaussian_of(one.task, one.factor, one.batch, one.calibration)[0] for one in members]
        dtypes = [one.task.network.dtype for one in members]
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        graph = FusedGraph(
            networks,
            _places(members, shared=shared),
            classes=classes,
            dtype=dtype,
            scales=[one.scale for one in members],
            discrepancies=[one.discrepancy for one in members],
            covariance_scale=request.calibration.covariance_scale,
        )
        like = torch.empty(0, dtype=dtype)
        normal = standard_normal(request.samples, classes - 1, request.seed, like, request.draws).T
        draws = Draws(normal.contiguous(), request.thresholds, request.calibration.temperature, request.level)
        return PredictionGraph(graph, draws, dtype=torch.float64, outputs=request.outputs)

    about = {
        "errbar": __version__,
        "networks": [{**described_task(one.task), **vars(one.calibration)} for one in members],
        "scales": [one.scale for one in members],
        # JSON has no infinity.
        "discrepancies": [one.discrepancy if math.isfinite(one.discrepancy) else None for one in members],
        "temperature": request.calibration.temperature,
        "covariance_scale": request.calibration.covariance_scale,
        **described_request(request),
    }
    write_graph(path, make, examples, request, about)


def _places(members: Sequence[Member], *, shared: bool) -> list[list[tuple[int, torch.dtype]]]:
    """Which inputs of the graph each network takes, and in which dtype."""
    places, start = [], 0
    for member in members:
        values = [*named_inputs(member.batch).values()]
        places.append([(start + place, value.dtype) for place, value in enumerate(values)])
        start += 0 if shared else len(values)
    return places
