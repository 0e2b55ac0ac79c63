"""Held-out positions (tokens, pixels) for calibration: some of them, since there are many and neighbours are alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._curvature.positions import Positions
from errbar._curvature.registry import structure_called
from errbar._distributions.logits import LogitGaussian
from errbar._model.batch import Batch
from errbar._model.network import require_finite_logits
from errbar._model.positions import HeadNetwork
from errbar._posterior.positions import leading_shape, logits_of_positions
from errbar._posterior.posterior import Posterior
from errbar.errors import LabelError

# Positions that calibration looks at: those with the smallest keys, so the same ones in any order of the data.
MOST_POSITIONS = 10_000
_KEY_LIMIT = 2**63 - 1


def chosen_positions(
    posterior: Posterior, stream: Iterator[Batch], samples: int, seed: int
) -> tuple[list[LogitGaussian], list[Tensor]]:
    """N(ĝ, P^g) without calibration, and the labels, of up to `MOST_POSITIONS` positions that have a label.

    Which ones follows from the inputs alone, not from batches and their order. Behind the last layer P^g is by so many
    draws of the parameters.
    """
    parts: list[tuple[Int[Tensor, "k"], LogitGaussian, Int[Tensor, "k"]]] = []
    limit = _KEY_LIMIT
    for batch in stream:
        part = _below(posterior, batch, limit, samples, seed)
        if part is not None:
            parts.append(part)
        if sum(len(keys) for keys, _, _ in parts) > 2 * MOST_POSITIONS:
            parts, limit = _smallest(parts)
    parts, _ = _smallest(parts)
    return [gaussian for _, gaussian, _ in parts], [labels for _, _, labels in parts]


def _below(
    posterior: Posterior, batch: Batch, limit: int, samples: int, seed: int
) -> tuple[Tensor, LogitGaussian, Tensor] | None:
    """The positions of a batch that have a label and a key below the limit."""
    task = posterior.information.task
    assert task.positions is not None
    every = Positions(task.positions.head, ignore_index=task.positions.ignore_index)
    network = task.network
    network.require_unchanged()
    if batch.labels is None:
        raise LabelError(
            "Labels are missing: expected batches (x, labels), or a mapping with 'labels', with one class number for "
            "each position. Pass unpack= if the labels are somewhere else in the batch."
        )
    with plain_execution(network.device):
        checks = Checks(network.device)
        # All positions count alike, whatever the weights of their inputs.
        whole = replace(network.prepare_whole(batch, checks), weights=None)
        if isinstance(network, HeadNetwork):
            rows = every.rows(network, whole, task.n_classes)
            assert rows.keys is not None
            chosen = rows.keys < limit
            if not bool(chosen.any()):
                return None
            few = Batch((rows.args[0][chosen],))
            parts = list(structure_called(task.structure).gaussians(task, posterior.factor, few))
            gaussian, labels, keys = LogitGaussian.concatenated(parts), rows.labels[chosen], rows.keys[chosen]
            require_finite_logits(gaussian.mean, checks)
            checks.finish()
            return keys, gaussian, labels
        checks.finish()
        leading = leading_shape(task, whole)
        keep, all_labels, all_keys = every.counted(whole, leading, task.n_classes)
    assert all_labels is not None
    chosen = (keep & (all_keys < limit)).flatten()
    if not bool(chosen.any()):
        return None
    plain = posterior.uncalibrated()
    logits = logits_of_positions(task, posterior.factor, plain.calibration, whole, None, samples, seed)
    return all_keys.flatten()[chosen], logits.rows().at(chosen), all_labels.flatten()[chosen]


def _smallest(
    parts: list[tuple[Tensor, LogitGaussian, Tensor]],
) -> tuple[list[tuple[Tensor, LogitGaussian, Tensor]], int]:
    """Of all positions those with the smallest keys, and the limit below which these lie."""
    if sum(len(keys) for keys, _, _ in parts) <= MOST_POSITIONS:
        return parts, _KEY_LIMIT
    limit = int(torch.cat([keys for keys, _, _ in parts]).kthvalue(MOST_POSITIONS + 1).values)
    smallest = []
    for keys, gaussian, labels in parts:
        chosen = keys < limit
        if bool(chosen.any()):
            smallest.append((keys[chosen], gaussian.at(chosen), labels[chosen]))
    return smallest, limit
