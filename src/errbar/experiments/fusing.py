"""Several classifiers of the same objects: single networks, pools, the paper's fusion and `calibrate_fusion` compared.

All is fitted on held-out inputs and reported on others. Only the logit Gaussians of the networks are needed, so that
they can be computed once and halved in many ways.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import errbar
from errbar._base.execution import plain_execution
from errbar._base.progress import track
from errbar._distributions.covariance import FullCovariance
from errbar._operations.calibrate_fusion import MEAN_OF_LOGITS, best_fusion
from errbar._operations.folds import standard_error
from errbar._operations.fusion_variants import Alone, Fit, PmfPool, Pool, Readings, above, draws_for, fitted
from errbar.experiments.problem import Samples

_PART = 500  # inputs at a time, for networks with convolutions
_DRAWS = 1024
_NORMAL_95 = 1.96


def gaussians_of(
    posterior: errbar.Posterior, x: Float[Tensor, "N ..."], *, progress: bool = False, title: str = "Logits"
) -> errbar.LogitGaussian:
    """The logits of many inputs, with the covariance before it is rounded, on the CPU."""
    parts = []
    for part in track(x.split(_PART), title, enabled=progress):
        gaussian = posterior.unrounded_logits(part).centered()
        parts.append(errbar.LogitGaussian(gaussian.mean.cpu(), FullCovariance(gaussian.covariance.cpu())))
    return errbar.LogitGaussian.concatenated(parts)


def rows_of(gaussian: errbar.LogitGaussian, rows: Int[Tensor, "n"]) -> errbar.LogitGaussian:
    """Some of the inputs, in this order."""
    return errbar.LogitGaussian(gaussian.mean[rows], FullCovariance(gaussian.covariance[rows]))


def compare(
    posteriors: Sequence[errbar.Posterior], held_out: Samples, report: Samples, *, seed: int = 0, samples: int = 128
) -> dict[str, Any]:
    """Networks of any kind: `held_out` fits everything, `report` measures."""
    first, second = ([gaussians_of(member, part.x) for member in posteriors] for part in (held_out, report))
    return compare_gaussians(first, held_out.y.cpu(), {"report": (second, report.y.cpu())}, seed=seed, samples=samples)


def compare_gaussians(
    held_out: Sequence[errbar.LogitGaussian],
    labels: Int[Tensor, "N"],
    reports: dict[str, tuple[Sequence[errbar.LogitGaussian], Int[Tensor, "R"]]],
    *,
    seed: int = 0,
    samples: int = 128,
) -> dict[str, Any]:
    """From the logits of each network: NLL of each method, and its paired difference to the mean of logits."""
    readings = Readings.of([[gaussian] for gaussian in held_out], labels)
    with plain_execution(readings.means.device):
        start = time.perf_counter()
        choice = best_fusion(readings, 5, seed, samples)
        seconds = time.perf_counter() - start
        fits = {**_baselines(readings, samples, seed), "calibrate_fusion": choice.fit}
        results = {name: _reported(fits, gaussians, own) for name, (gaussians, own) in reports.items()}
    numbers = asdict(choice.fit.variant.numbers(choice.fit.theta))
    chosen = {"chosen": choice.table.chosen, "numbers": numbers, "table": asdict(choice.table), "seconds": seconds}
    return {"calibrate_fusion": chosen, "reports": results}


def _baselines(readings: Readings, samples: int, seed: int) -> dict[str, Fit]:
    """Each network with T, and with T and q, of its own; and the pools."""
    normal = draws_for(readings, samples, seed)
    count = readings.networks
    fits: dict[str, Fit] = {}
    for c, variance in enumerate(readings.typical_variances().tolist()):
        tempered = Alone(f"network {c}, T", count, None, c, width=False)
        fits[tempered.name] = fitted(tempered, readings, normal, tempered.starts())
        if variance > 0:
            wide = Alone(f"network {c}, T and q", count, None, c, True, variance, above(fits[tempered.name]))
            fits[wide.name] = fitted(wide, readings, normal, wide.starts())
    pools = (
        PmfPool("mean of PMFs, T", count),
        Pool(MEAN_OF_LOGITS, count),
        Pool("weighted logarithmic pool", count, weighted=True),
    )
    return fits | {pool.name: fitted(pool, readings, normal, pool.starts()) for pool in pools}


def _reported(
    fits: dict[str, Fit], gaussians: Sequence[errbar.LogitGaussian], labels: Int[Tensor, "R"]
) -> dict[str, dict[str, float]]:
    readings = Readings.of([[gaussian] for gaussian in gaussians], labels)
    normal = draws_for(readings, _DRAWS, 1)
    losses = {name: fit.losses(readings, normal) for name, fit in fits.items()}
    losses["errbar.fuse"] = _losses_of_fuse(gaussians, labels)
    inputs = torch.arange(len(labels))
    rows = {}
    for name, own in losses.items():
        difference = own - losses[MEAN_OF_LOGITS]
        rows[name] = {
            "nll": float(own.mean()),
            "difference": float(difference.mean()),
            "half_width": _NORMAL_95 * standard_error(difference, inputs),
        }
    return rows


def _losses_of_fuse(gaussians: Sequence[errbar.LogitGaussian], labels: Int[Tensor, "R"]) -> Float[Tensor, "R"]:
    """−ln f_y of the paper's fusion, from which nothing is fitted."""
    fused = errbar.fuse([errbar.LogitGaussian(g.mean.double(), FullCovariance(g.covariance)) for g in gaussians])
    pmf = fused.predict(_DRAWS).pmf.double()
    return -pmf.gather(1, labels[:, None])[:, 0].clamp_min(torch.finfo(torch.float64).tiny).log()
