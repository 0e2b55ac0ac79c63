"""Several labels and positions: every label that is given, or position that has one, is a decision of its own.

A label is two classes, false and true, and a position is one of M. So their scores are those of classes, over decisions
in place of inputs; but decisions of one input depend on each other, so intervals come from resampling the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar import metrics
from errbar._distributions.prediction import LabelPrediction, Prediction
from errbar._model.batch import Batch
from errbar._model.outputs import LABELS
from errbar._posterior.positions import counted_positions
from errbar._posterior.posterior import Posterior
from errbar.errors import DataError, LabelError
from errbar.report.observing import AFTER, BEFORE, NETWORK, Fingerprint, Observation
from errbar.report.values import LabelRow

# Positions that a report looks at: those with the smallest keys, so the same ones in any order of the data.
MOST_POSITIONS = 100_000
_KEY_LIMIT = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Decided:
    """What a posterior says about all decisions of some inputs.

    `logits` are those of the network, `std` that of the probability of what is more probable, `place` which label of
    its input a decision is about, and `scores` the outlier scores of each input.
    """

    observation: Observation
    logits: Float[Tensor, "D M"]
    std: Float[Tensor, "D"]
    place: Int[Tensor, "D"]
    scores: dict[str, Float[Tensor, "N"]]

    @property
    def inputs(self) -> int:
        return len(next(iter(self.scores.values())))


@dataclass(frozen=True, eq=False)
class _Part:
    """The decisions of one batch; `inputs` counts from its first row."""

    pmfs: dict[str, Float[Tensor, "d M"]]
    labels: Int[Tensor, "d"]
    inputs: Int[Tensor, "d"]
    logits: Float[Tensor, "d M"]
    std: Float[Tensor, "d"]
    place: Int[Tensor, "d"]
    keys: Int[Tensor, "d"]

    def at(self, chosen: Tensor) -> _Part:
        rest = (self.labels, self.inputs, self.logits, self.std, self.place, self.keys)
        pmfs = {name: pmf[chosen] for name, pmf in self.pmfs.items()}
        return _Part(pmfs, *(column[chosen] for column in rest))


def decided(
    posterior: Posterior, stream: Iterable[Batch], samples: int, seed: int, fingerprint: Fingerprint
) -> Decided:
    """One pass over labelled data."""
    parts: list[_Part] = []
    scores: dict[str, list[Tensor]] = {}
    start, limit = 0, _KEY_LIMIT
    for batch in stream:
        part, own = _of_batch(posterior, batch, samples, seed)
        fingerprint.add(batch, torch.as_tensor(batch.labels).cpu())
        for name, values in own.items():
            scores.setdefault(name, []).append(values)
        parts.append(part.at(part.keys < limit))
        parts[-1].inputs.add_(start)
        start += len(batch)
        if sum(len(one.keys) for one in parts) > 2 * MOST_POSITIONS:
            parts, limit = _smallest(parts)
    if not start:
        raise DataError("The data are empty: expected at least one batch.")
    parts, _ = _smallest(parts)
    labels = torch.cat([part.labels for part in parts])
    if not len(labels):
        raise LabelError("All labels of the data are missing; expected some that are given.")
    pmfs = {name: torch.cat([part.pmfs[name] for part in parts]) for name in parts[0].pmfs}
    return Decided(
        Observation(pmfs, labels, torch.cat([part.inputs for part in parts])),
        torch.cat([part.logits for part in parts]),
        torch.cat([part.std for part in parts]),
        torch.cat([part.place for part in parts]),
        {name: torch.cat(own) for name, own in scores.items()},
    )


def scores_of(posterior: Posterior, stream: Iterable[Batch], samples: int, seed: int) -> dict[str, Float[Tensor, "K"]]:
    """The outlier scores of each input; labels are ignored."""
    columns: dict[str, list[Tensor]] = {}
    for batch in stream:
        network = _variants(posterior)[NETWORK].predict(batch, 1)
        for name, values in _scores(posterior, batch, network, posterior.predict(batch, samples, seed)).items():
            columns.setdefault(name, []).append(values)
    if not columns:
        raise DataError("The second set is empty: expected at least one batch.")
    return {name: torch.cat(parts) for name, parts in columns.items()}


def label_rows(found: Decided, names: Sequence[str], bins: int) -> tuple[LabelRow, ...]:
    """One row for each label."""
    rows = []
    for number, name in enumerate(names):
        own = found.place == number
        pmf, truth = found.observation.final[own].double(), found.observation.labels[own, None]
        f = pmf[:, 1:]
        rows.append(
            LabelRow(
                name=name,
                given=len(truth),
                true=float(truth.double().mean()) if len(truth) else math.nan,
                probability=float(f.mean()) if len(truth) else math.nan,
                std=float(found.std[own].mean()) if len(truth) else math.nan,
                nll=metrics.label_nll(f, truth, complement=pmf[:, :1]) if len(truth) else math.nan,
                ece=metrics.label_ece(f, truth, bins)[0] if len(truth) else math.nan,
                auroc=metrics.label_auroc(f, truth)[0] if len(truth) else math.nan,
                precision=metrics.label_average_precision(f, truth)[0] if len(truth) else math.nan,
            )
        )
    return tuple(rows)


def _variants(posterior: Posterior) -> dict[str, Posterior]:
    plain = posterior.uncalibrated()
    variants = {NETWORK: plain.with_calibration(covariance_scale=0.0), BEFORE: plain}
    return variants | ({AFTER: posterior} if posterior.is_calibrated else {})


def _of_batch(
    posterior: Posterior, batch: Batch, samples: int, seed: int
) -> tuple[_Part, dict[str, Float[Tensor, "B"]]]:
    # Without a covariance all samples are the same.
    predictions = {
        name: one.predict(batch, 1 if name == NETWORK else samples, seed) for name, one in _variants(posterior).items()
    }
    final = [*predictions.values()][-1]
    of_batch = _labels if posterior.information.task.positions is None else _positions
    return of_batch(posterior, batch, predictions), _scores(posterior, batch, predictions[NETWORK], final)


def _labels(posterior: Posterior, batch: Batch, predictions: Mapping[str, Prediction]) -> _Part:
    """False and true as two classes, each with digits of its own."""
    final = [*predictions.values()][-1]
    network, columns = posterior.information.network, posterior.information.n_classes
    truth = LABELS.labels_of(batch.labels, size=len(batch), columns=columns, device=torch.device("cpu"))
    given = truth >= 0
    index = given.nonzero()
    logits = network.logits(posterior.prepared(batch)).detach().cpu()[given]
    return _Part(
        {
            name: torch.stack([prediction.complement.cpu()[given], prediction.pmf.cpu()[given]], 1)
            for name, prediction in predictions.items()
            if isinstance(prediction, LabelPrediction)
        },
        truth[given],
        index[:, 0],
        torch.stack([torch.zeros_like(logits), logits], 1),
        final.std.cpu()[given],
        index[:, 1],
        torch.zeros_like(index[:, 0]),
    )


def _positions(posterior: Posterior, batch: Batch, predictions: Mapping[str, Prediction]) -> _Part:
    final = [*predictions.values()][-1]
    if batch.labels is None:
        raise LabelError("Labels are missing: expected batches (x, labels), or a mapping with 'labels'.")
    keep, labels, keys = _counted(posterior, batch, final)
    assert labels is not None
    std = final.std.gather(-1, final.label[..., None])[..., 0].cpu()
    inputs = keep.nonzero()[:, 0]
    chosen = {name: prediction.pmf.cpu()[keep] for name, prediction in predictions.items()}
    logits = chosen[NETWORK].double().clamp_min(1e-300).log()
    return _Part(chosen, labels[keep], inputs, logits, std[keep], torch.zeros_like(inputs), keys[keep])


def _counted(
    posterior: Posterior, batch: Batch, prediction: Prediction
) -> tuple[Bool[Tensor, "B *S"], Int[Tensor, "B *S"] | None, Int[Tensor, "B *S"]]:
    """Which positions count, their labels, and a key for each."""
    leading = tuple(prediction.pmf.shape[:-1])
    keep, labels, keys = counted_positions(posterior.information.task, batch, leading)
    return keep.cpu(), None if labels is None else labels.cpu(), keys.cpu()


def _scores(
    posterior: Posterior, batch: Batch, network: Prediction, final: Prediction
) -> dict[str, Float[Tensor, "B"]]:
    """The scores by name: the mean over the decisions of an input, without positions that a mask leaves out."""
    columns = {
        "entropy of the network alone (nats)": network.entropy,
        "entropy with error bars (nats)": final.entropy,
        "mutual information (nats)": final.mutual_information,
    }
    keep = torch.ones(final.entropy.shape, dtype=torch.bool)
    if posterior.information.task.positions is not None:
        keep = _counted(posterior, replace(batch, labels=None), final)[0]
    count = keep.flatten(1).sum(1)
    return {
        name: torch.where(keep, values.cpu().double(), 0.0).flatten(1).sum(1) / count
        for name, values in columns.items()
    }


def _smallest(parts: list[_Part]) -> tuple[list[_Part], int]:
    """Of all decisions those with the smallest keys, and the limit below which these lie."""
    keys = torch.cat([part.keys for part in parts])
    if len(keys) <= MOST_POSITIONS or not bool(keys.any()):
        return parts, _KEY_LIMIT
    limit = int(keys.kthvalue(MOST_POSITIONS + 1).values)
    return [part.at(part.keys < limit) for part in parts], limit
