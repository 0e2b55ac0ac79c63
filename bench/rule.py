"""How often does the rule of `autofit` choose something worse than temperature scaling, where nothing is better?

Labels are drawn from softmax(ĝ/T) of a known T, so temperature scaling is the truth, and every candidate (Gaussians of
made-up covariances, of several sizes and "exact" or not) can only be as good. For each size of the held-out data: the
share of problems in which the rule took a candidate, and the excess of its NLL over temperature scaling on fresh data
(median, 95th percentile, most).

    python bench/rule.py [--repetitions 100] [--processes 2] [-o bench/results/rule.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from errbar._base.progress import track
from errbar._calibration.folds import divided
from errbar._calibration.held_out import HeldOut
from errbar._calibration.search import calibration_near, largest_covariance
from errbar._choosing.choice import Row, Trial, best_trial, is_as_good
from errbar._choosing.links import judged, scaled_softmax
from errbar._distributions.sampling import SamplingRoot

CLASSES, FOLDS, FRESH, TEMPERATURE = 5, 5, 20_000, 1.5
# Scale of the covariance, parameters, and whether the structure counts as exact.
CANDIDATES = ((0.3, 100, True), (1.0, 1000, True), (3.0, 5000, True), (1.0, 20_000, False))


def draw(count: int, scale: float, seed: int, rows: int) -> HeldOut:
    """Inputs with logits from one seed, and covariances of varied size from another."""
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(count, CLASSES, generator=generator)
    mean -= mean.mean(1, keepdim=True)
    labels = torch.multinomial(torch.softmax(mean / TEMPERATURE, 1), 1, generator=generator)[:, 0]
    own = torch.Generator().manual_seed(1000 * seed + rows)
    size = scale * torch.exp(torch.randn(count, 1, 1, generator=own))
    root = size * torch.randn(count, CLASSES, CLASSES - 1, generator=own) / CLASSES**0.5
    root -= root.mean(1, keepdim=True)
    variance = root.square().sum((1, 2)).double() / (CLASSES - 1)
    return HeldOut(mean, SamplingRoot(root), labels, variance)


def row(judgement: Any, parameters: int, exact: bool) -> Row:
    at, scores = judgement.calibration, judgement.scores
    return Row(
        "", "dense", "ggn", parameters, exact, "", at.temperature, at.covariance_scale, at.softening, 1.0, "evidence",
        scores.nll, 0.0, 0.0, 0.0, 0.0, (0.0, 0.0), 0.0, 0.0, 0,
    )  # fmt: skip


def excess(count: int, seed: int) -> tuple[bool, float]:
    """Whether the rule took a candidate, and what it costs on fresh inputs against temperature scaling."""
    folds = divided(torch.arange(count), FOLDS, seed)
    tried: list[tuple[Trial, Any, HeldOut, int]] = []
    for number, (scale, parameters, exact) in enumerate(CANDIDATES):
        held_out = draw(count, scale, seed, number)
        for judgement in judged([held_out], folds, 0):
            trial = Trial(row(judgement, parameters, exact), judgement.scores.losses)
            tried.append((trial, judgement, held_out, number))
    scaling, scores = scaled_softmax(tried[0][2], folds)
    best = best_trial([trial for trial, *_ in tried], scores.losses, torch.arange(count))
    if best is None:
        number, at = 0, largest_covariance(tried[0][2], 1000, 0, partial(is_as_good, groups=torch.arange(count)))
    else:
        _, judgement, held_out, number = next(one for one in tried if one[0] is best)
        at = calibration_near(held_out, judgement.names, judgement.calibration, 400, 0)
    fresh = draw(FRESH, CANDIDATES[number][0], 100_000 + seed, number)
    normal = fresh.draws(400, 1)
    losses = (fresh.nll(calibration, normal) for calibration in (at, replace(scaling, covariance_scale=0.0)))
    mine, theirs = losses
    return best is not None, mine - theirs


def quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="with one thread each")
    options = parser.parse_args()
    rows = []
    for count in (300, 1000, 3000):
        with get_context("spawn").Pool(options.processes, quiet) as pool:
            found = pool.imap(partial(excess, count), range(options.repetitions))
            results = list(track(found, f"{count} held-out inputs", total=options.repetitions))
        costs = sorted(cost for _, cost in results)
        worse = [cost for cost in costs if cost > 3e-4]
        rows.append(
            {
                "held out": count,
                "repetitions": options.repetitions,
                "took a candidate": sum(took for took, _ in results) / len(results),
                "worse by more than 0.0003": len(worse) / len(results),
                "median": statistics.median(costs),
                "95 %": costs[min(len(costs) - 1, int(0.95 * len(costs)))],
                "most": costs[-1],
            }
        )
        print(rows[-1], flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
