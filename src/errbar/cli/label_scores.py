"""`errbar evaluate` for several labels: how good their probabilities are, together and one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import Tensor

import errbar
from errbar import metrics
from errbar._base.checks import Checks
from errbar._base.progress import track
from errbar._model.batch import batches, count_batches
from errbar._model.outputs import LABELS
from errbar.cli.inputs import Source
from errbar.cli.session import Session, table
from errbar.errors import DataError


@dataclass(frozen=True, eq=False)
class _Probabilities:
    """That labels are true and that they are false, each with digits of its own, as a prediction has them."""

    pmf: Tensor
    complement: Tensor

    @staticmethod
    def joined(parts: Sequence[_Probabilities]) -> _Probabilities:
        return _Probabilities(torch.cat([part.pmf for part in parts]), torch.cat([part.complement for part in parts]))


def evaluate_labels(
    here: Session,
    posterior: errbar.Posterior,
    names: tuple[str, ...] | None,
    source: Source,
    samples: int,
    bins: int,
    seed: int,
    report: Path | None = None,
) -> None:
    """Measure what the network alone says, σ(g), and what the posterior says, and answer with tables."""
    here.require_one_process("evaluate of several labels")
    network, calibrated, labels = _read(here, posterior, source, samples, seed)
    variants = {"network": network, "posterior": calibrated}
    scores = {name: _scores(one, labels) for name, one in variants.items()}
    each = _by_label(calibrated.pmf, labels, bins)
    titles = names or tuple(str(number) for number in range(labels.shape[1]))
    facts: dict[str, Any] = {
        "inputs": len(labels),
        "labels_given": int((labels >= 0).sum()),
        **vars(posterior.calibration),
        "label_temperatures": posterior.label_temperatures,
        "label_covariance_scales": posterior.label_covariance_scales,
        "bins": bins,
        "scores": scores,
        "by_label": {title: dict(zip(each, row, strict=True)) for title, row in _rows(each, titles)},
    }
    headings = ("", "accuracy", "NLL", "Brier", "mAP")
    parts: list[RenderableType] = [
        table(f"{len(labels):,} inputs", headings, [(name, *row.values()) for name, row in scores.items()]),
        table("By label", ("", *each), [(title, *row) for title, row in _rows(each, titles)]),
    ]
    if report is not None:
        facts |= {"report": report, "bytes": report.stat().st_size}
        parts.append(f"The page: {report}")
    here.answer(facts, Group(*parts))


def _read(
    here: Session, posterior: errbar.Posterior, source: Source, samples: int, seed: int
) -> tuple[_Probabilities, _Probabilities, Tensor]:
    """σ(g), the probabilities of the posterior and the labels, of all inputs."""
    network = posterior.information.network
    plain: list[_Probabilities] = []
    calibrated: list[_Probabilities] = []
    labels: list[Tensor] = []
    loader = source.loader()
    for batch in track(batches(loader), "Predicting", total=count_batches(loader), enabled=here.progress):
        gaussian = posterior.sampling_logits(batch, samples, seed)
        prediction = gaussian.predict(samples, seed)
        assert isinstance(prediction, errbar.LabelPrediction)
        calibrated.append(_Probabilities(prediction.pmf.double().cpu(), prediction.complement.double().cpu()))
        logits = network.logits(posterior.prepared(batch)).detach().double().cpu()
        plain.append(_Probabilities(torch.sigmoid(logits), torch.sigmoid(-logits)))
        size, columns = logits.shape
        own = LABELS.labels_of(
            batch.labels, size=size, columns=columns, device=logits.device, checks=Checks(here.device)
        )
        labels.append(own)
    if not labels:
        raise DataError(f"The data {source.where} are empty: expected at least one batch.")
    return _Probabilities.joined(plain), _Probabilities.joined(calibrated), torch.cat(labels)


def _scores(probability: _Probabilities, labels: Tensor) -> dict[str, float]:
    return {
        "accuracy": metrics.label_accuracy(probability.pmf, labels),
        "nll": metrics.label_nll(probability.pmf, labels, complement=probability.complement),
        "brier": metrics.label_brier(probability.pmf, labels),
        "map": metrics.label_map(probability.pmf, labels) if bool((labels == 1).any()) else math.nan,
    }


def _by_label(probability: Tensor, labels: Tensor, bins: int) -> dict[str, list[float]]:
    given = labels >= 0
    return {
        "given": given.sum(0).double().tolist(),
        "true": (labels == 1).sum(0).double().div(given.sum(0)).tolist(),
        "ECE": metrics.label_ece(probability, labels, bins),
        "AUROC": metrics.label_auroc(probability, labels),
        "AP": metrics.label_average_precision(probability, labels),
    }


def _rows(each: dict[str, list[float]], titles: tuple[str, ...]) -> list[tuple[str, list[float]]]:
    return [(title, [values[number] for values in each.values()]) for number, title in enumerate(titles)]
