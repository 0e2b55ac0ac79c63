"""What a posterior says about every position of an input: tokens of a sequence, pixels of a picture."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from errbar._base.checks import Checks
from errbar._base.execution import graph_execution, plain_execution
from errbar._base.memory import require_memory
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import Factor
from errbar._curvature.task import Task
from errbar._distributions.calibration import Calibration
from errbar._distributions.covariance import DrawnCovariance
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.positions import PositionLogits, PositionsPrediction
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import GivenSampler, probabilities_, require_samples, require_seed
from errbar._model.batch import Batch, Unpack, input_batch, is_stream
from errbar._model.fixed import fixed
from errbar._model.network import Network, require_finite_logits
from errbar._model.outputs import CLASSES
from errbar._model.positions import HeadNetwork, PositionsNetwork
from errbar._posterior.pushing import pushed_deviations
from errbar.errors import ArgumentError

# Draws of the logits of each position where nobody says how many, of parameters behind the last layer.
DRAWS = 100


def logits_of_positions(
    task: Task,
    factor: Factor,
    calibration: Calibration,
    x: Any,
    unpack: Unpack | None,
    samples: int,
    seed: int,
    *,
    differentiable: bool = False,
) -> PositionLogits:
    """N(ĝ/T(x), T_c P^g/T(x)²) of every position; by draws, whose number is `samples`, behind the last layer.

    With a graph from `x` where it is `differentiable`, for as long as the result is used.
    """
    if differentiable:
        task = task.on(fixed(task.network))
    batch = _prepared(task, x, unpack)
    if isinstance(task.network, HeadNetwork):
        return _of_head(task, factor, calibration, batch)
    return _of_draws(task, factor, calibration, batch, require_samples(samples), require_seed(seed))


def prediction_by_parameters(task: Task, logits: Tensor, leading: tuple[int, ...]) -> PositionsPrediction:
    """The prediction of logits (B, S·M, K), or (B·S, M, K), that were drawn with their parameters."""
    values = probabilities_(logits.reshape(-1, task.n_classes, logits.shape[-1]), CLASSES)
    return PositionsPrediction.of(Prediction.from_sampler(GivenSampler(values)), leading, ignored_by(task))


def not_for_positions(what: str) -> ArgumentError:
    """Why an argument cannot be had with `outputs="positions"`."""
    return ArgumentError(f"{what} for one PMF of each input, and here every position has its own; leave it out.")


def ignored_by(task: Task) -> int:
    """The label of positions without one."""
    assert task.positions is not None
    return task.positions.ignore_index


def leading_shape(task: Task, batch: Batch) -> tuple[int, ...]:
    """(B, *S) of a batch that is prepared for the whole network."""
    with torch.no_grad():
        return tuple(_whole(task).shaped(batch).shape[:-1])


def counted_positions(
    task: Task, batch: Batch, leading: tuple[int, ...]
) -> tuple[Bool[Tensor, "B *S"], Int[Tensor, "B *S"] | None, Int[Tensor, "B *S"]]:
    """Which positions of a batch count, their labels if there are any, and a key for each, whatever share a fit took:
    those that an attention mask keeps and, where there are labels, that have one."""
    assert task.positions is not None
    prepared = _whole(task).prepare(batch, Checks(task.network.device))
    return replace(task.positions, share=1.0).counted(prepared, leading, task.n_classes)


def _whole(task: Task) -> PositionsNetwork:
    network = task.network
    whole = network.whole if isinstance(network, HeadNetwork) else network
    assert isinstance(whole, PositionsNetwork)
    return whole


def _execution(network: Network) -> AbstractContextManager[None]:
    return (graph_execution if network.keeps_graph else plain_execution)(network.device)


def _prepared(task: Task, x: Any, unpack: Unpack | None) -> Batch:
    if is_stream(x):
        raise ArgumentError(
            "Got data of several batches; with outputs='positions' expected one batch of inputs, since each position "
            "has error bars of its own. Predict batch by batch."
        )
    whole = _whole(task)
    whole.require_unchanged()
    with _execution(whole):
        checks = Checks(whole.device)
        batch = whole.prepare(input_batch(x, unpack or task.unpack), checks)
        checks.finish()
    return batch


def _of_head(task: Task, factor: Factor, calibration: Calibration, batch: Batch) -> PositionLogits:
    network = task.network
    assert isinstance(network, HeadNetwork)
    with _execution(network):
        rows, leading = network.rows(batch)
        checks = Checks(network.device)
        mean = network.logits(rows)
        require_finite_logits(mean, checks)
        checks.finish()

    def gaussians_of(start: int, stop: int) -> LogitGaussian:
        with _execution(network):
            parts = structure_called(task.structure).gaussians(task, factor, rows.rows(start, stop))
            return LogitGaussian.concatenated(list(parts)).calibrated(calibration)

    return PositionLogits(gaussians_of, leading, task.n_classes, mean.to(network.dtype), ignored_by(task))


def _of_draws(
    task: Task, factor: Factor, calibration: Calibration, batch: Batch, samples: int, seed: int
) -> PositionLogits:
    network = _whole(task)
    with _execution(network):
        shaped = network.shaped(batch)
        leading, mean = tuple(shaped.shape[:-1]), shaped.flatten(0, -2).to(network.dtype)
        checks = Checks(network.device)
        require_finite_logits(mean, checks)
        checks.finish()
        require_memory(
            2 * mean.numel() * samples * mean.element_size(),
            network.device,
            what=f"Holding {samples:,} draws of the logits of {len(mean):,} positions",
            instead="Predict fewer inputs at a time, or ask for fewer samples.",
        )
        deviations = pushed_deviations(task, factor, batch, samples, seed).to(mean.dtype)
        rows = deviations.reshape(len(mean), task.n_classes, samples)
        drawn = LogitGaussian(mean, DrawnCovariance(rows)).calibrated(calibration)
    return PositionLogits(lambda start, stop: drawn[start:stop], leading, task.n_classes, mean, ignored_by(task))
