"""`errbar evaluate` for positions: how good the PMFs of all tokens or pixels with a label are."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.console import Group, RenderableType
from torch import Tensor

import errbar
from errbar._base.progress import track
from errbar._model.batch import batches, count_batches
from errbar._posterior.positions import counted_positions
from errbar.cli.inputs import Source
from errbar.cli.session import Session, table
from errbar.errors import LabelError


@dataclass(eq=False)
class _Sums:
    """What adds up over positions: the scores, and the bins of the ECE."""

    bins: int
    totals: Float[Tensor, "4"] = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    diagram: Float[Tensor, "3 J"] = field(init=False)

    def __post_init__(self) -> None:
        self.diagram = torch.zeros(3, self.bins, dtype=torch.float64)

    def add(self, pmf: Float[Tensor, "R M"], labels: Int[Tensor, "R"]) -> None:
        of_label = pmf.gather(1, labels[:, None])[:, 0]
        confidence, label = pmf.max(1)
        right = (label == labels).double()
        # Σ_m (δ_my − f_m)² = Σ_m f_m² − 2 f_y + 1
        brier = pmf.square().sum(1) - 2 * of_label + 1
        self.totals += torch.stack([torch.ones_like(right), right, -of_label.log(), brier]).sum(1)
        index = (confidence * self.bins).long().clamp_max(self.bins - 1)
        for row, values in enumerate((torch.ones_like(right), right, confidence)):
            self.diagram[row] += torch.bincount(index, values, minlength=self.bins)

    def scores(self) -> dict[str, float]:
        count, right, loss, brier = self.totals.tolist()
        gaps = float((self.diagram[1] - self.diagram[2]).abs().sum())
        return {"accuracy": right / count, "nll": loss / count, "brier": brier / count, "ece": gaps / count}


def evaluate_positions(
    here: Session,
    posterior: errbar.Posterior,
    source: Source,
    samples: int,
    bins: int,
    seed: int,
    report: Path | None = None,
) -> None:
    """Measure what the network alone says, and the posterior before and after calibration, and answer with a table."""
    here.require_one_process("evaluate of positions")
    task = posterior.information.task
    assert task.positions is not None
    variants = {"network": posterior.uncalibrated().with_calibration(covariance_scale=0.0)}
    if posterior.is_calibrated:
        variants["before calibration"] = posterior.uncalibrated()
    variants["after calibration" if posterior.is_calibrated else "posterior"] = posterior
    sums = {name: _Sums(bins) for name in variants}
    inputs = positions = 0
    loader = source.loader()
    for batch in track(batches(loader), "Predicting", total=count_batches(loader), enabled=here.progress):
        if batch.labels is None:
            raise LabelError(f"The data {source.where} have no labels; expected one for each position.")
        pmfs = {name: variant.predict(batch, samples, seed).pmf.cpu().double() for name, variant in variants.items()}
        leading = tuple(next(iter(pmfs.values())).shape[:-1])
        keep, labels, _ = counted_positions(task, batch, leading)
        assert labels is not None
        named, truth = keep.cpu(), labels[keep].cpu()
        for name, pmf in pmfs.items():
            sums[name].add(pmf[named], truth)
        inputs += leading[0]
        positions += len(truth)
    if not positions:
        raise LabelError(f"No position of the data {source.where} has a label; expected some that are not ignored.")
    scores = {name: own.scores() for name, own in sums.items()}
    facts: dict[str, Any] = {
        "inputs": inputs,
        "positions": positions,
        **vars(posterior.calibration),
        "bins": bins,
        "scores": scores,
    }
    headings = ("", "accuracy", "NLL", "Brier", "ECE")
    rows = [(name, *own.values()) for name, own in scores.items()]
    parts: list[RenderableType] = [table(f"{inputs:,} inputs, {positions:,} positions with a label", headings, rows)]
    if report is not None:
        facts |= {"report": report, "bytes": report.stat().st_size}
        parts.append(f"The page: {report}")
    here.answer(facts, Group(*parts))
