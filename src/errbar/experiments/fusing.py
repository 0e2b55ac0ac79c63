"""Several classifiers of the same objects: single networks, pools, the paper's fusion and `calibrate_fusion` compared.

All is fitted on held-out inputs and reported on others. Only the logit Gaussians of the networks are needed, so that
they can be computed once and halved in many ways.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import errbar
from errbar._base.execution import plain_execution
from errbar._base.progress import track
from errbar._calibration.folds import group_numbers
from errbar._calibration.held_out import HeldOut
from errbar._calibration.question import OBJECTIVES
from errbar._calibration.search import best_calibration
from errbar._distributions.calibration import Calibration
from errbar._distributions.covariance import FullCovariance
from errbar._fusion.calibrate_fusion import FusionChoice, best_fusion
from errbar._fusion.variants import Alone, Fit, PmfPool, Pool, Readings, draws_for, fitted

FUSED, FUSED_RAW = "calibrate_fusion", "calibrate_fusion, posteriors not calibrated"
BEST, BEST_WIDE, FUSE = "best network, T", "best network, errbar", "errbar.fuse"
ENSEMBLE, PMFS = "deep ensemble: mean of PMFs", "mean of PMFs, T"
LOGITS, POOL = "mean of logits, T", "weighted logarithmic pool, T"
# What `calibrate_fusion` must not lose to; and all methods, as tables have them.
BASELINES = (BEST, ENSEMBLE, PMFS, LOGITS, POOL, FUSE)
METHODS = (*BASELINES, BEST_WIDE, FUSED_RAW, FUSED)
_PART = 500  # inputs at a time, for networks with convolutions
_DRAWS, _FOLDS = 1024, 5


@dataclass(frozen=True, eq=False)
class Seen:
    """What each network says about the same inputs, their labels, and the number of the object that each one shows."""

    gaussians: Sequence[errbar.LogitGaussian]
    labels: Int[Tensor, "N"]
    objects: Int[Tensor, "N"]

    def of(self, networks: slice) -> Seen:
        """Some of the networks."""
        return Seen(self.gaussians[networks], self.labels, self.objects)

    def chosen(self, rows: Int[Tensor, "n"]) -> Seen:
        """Some of the inputs, in this order."""
        return Seen([rows_of(one, rows) for one in self.gaussians], self.labels[rows], self.objects[rows])

    def calibrated(self, calibrations: Sequence[Calibration]) -> Seen:
        each = zip(self.gaussians, calibrations, strict=True)
        return Seen([one.calibrated(by) for one, by in each], self.labels, self.objects)

    def readings(self, device: torch.device) -> Readings:
        # Many small eigenvalue problems are quicker on a CPU.
        made = Readings.of([[gaussian] for gaussian in self.gaussians], self.labels)
        return Readings(*(getattr(made, field.name).to(device) for field in fields(made)))


def calibrated_readings(readings: Readings, calibrations: Sequence[Calibration]) -> Readings:
    """N(ĝ/T, T_c P/T²) of each network, from readings without calibration."""
    T, scale = (
        torch.tensor(numbers, dtype=torch.float64, device=readings.means.device)[:, None, None]
        for numbers in zip(*((one.temperature, one.covariance_scale) for one in calibrations), strict=True)
    )
    return replace(readings, means=readings.means / T, values=readings.values * scale / T**2, along=readings.along / T)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Report → method → −ln f_y of each input; what `calibrate_fusion` took; and the NLL of what it did not take."""

    losses: Mapping[str, Mapping[str, Float[Tensor, "N"]]]
    facts: dict[str, Any]


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


def calibration_of(
    gaussian: errbar.LogitGaussian, labels: Int[Tensor, "N"], device: torch.device | str = "cpu", samples: int = 1000
) -> Calibration:
    """T and T_c by NLL, as `errbar.calibrate` finds them, from logits that were computed already."""
    own = errbar.LogitGaussian(gaussian.mean.to(device), FullCovariance(gaussian.covariance.to(device)))
    held_out = HeldOut(own.mean, own.sampling_root(), labels.to(device), own.contrast_variance)
    with plain_execution(own.mean.device):
        names = ("temperature", "covariance_scale")
        return best_calibration(held_out, OBJECTIVES["nll"], names, Calibration(), samples, 0)[0]


def compare(
    held_out: Seen,
    reports: Mapping[str, Seen],
    calibrations: Sequence[Calibration],
    *,
    seed: int = 0,
    samples: int = 128,
    device: torch.device | str = "cpu",
) -> Comparison:
    """From the logits of posteriors that are not calibrated: `held_out` fits everything, `reports` measure.

    `calibrate_fusion` and `errbar.fuse` take the posteriors with the T and T_c of `calibrations`, as is recommended;
    pools and single networks are of the logits as the networks give them, with a T of their own.
    """
    device = torch.device(device)
    raw = held_out.readings(device)
    groups = group_numbers(held_out.objects.tolist(), len(held_out.labels))
    losses: dict[str, dict[str, Tensor]] = {}
    variants: dict[str, dict[str, dict[str, float]]] = {}
    facts: dict[str, Any] = {}
    with plain_execution(device):
        fits = _baselines(raw, samples, seed)
        choices: dict[str, FusionChoice] = {}
        for key, readings in ((FUSED, calibrated_readings(raw, calibrations)), (FUSED_RAW, raw)):
            start = time.perf_counter()
            choice = choices[key] = best_fusion(readings, _FOLDS, seed, samples, groups=groups)
            facts[key] = {
                "chosen": choice.table.chosen,
                "numbers": asdict(choice.fit.variant.numbers(choice.fit.theta)),
                "table": asdict(choice.table),
                "seconds": time.perf_counter() - start,
            }
        for name, seen in reports.items():
            readings = seen.readings(device)
            adapted = seen.calibrated(calibrations)
            found = {
                FUSED: _of_variants(choices[FUSED], calibrated_readings(readings, calibrations)),
                FUSED_RAW: _of_variants(choices[FUSED_RAW], readings),
            }
            losses[name] = {
                **{key: fit.losses(readings, draws_for(readings, 1, 1)) for key, fit in fits.items()},
                ENSEMBLE: _of_pmf(_mean_pmf(seen), seen.labels),
                FUSE: _of_gaussian(errbar.fuse(_doubled(adapted)), seen.labels),
                BEST_WIDE: _of_best(held_out.calibrated(calibrations), adapted),
                **{key: own[choices[key].table.chosen] for key, own in found.items()},
            }
            variants[name] = {
                key: {each: float(own.mean()) for each, own in of_variants.items()}
                for key, of_variants in found.items()
            }
    return Comparison(losses, {**facts, "variants": variants, "calibrations": [asdict(one) for one in calibrations]})


def _baselines(readings: Readings, samples: int, seed: int) -> dict[str, Fit]:
    """The best network by NLL of the held-out inputs, and the pools, each with T."""
    normal = draws_for(readings, samples, seed)
    count = readings.networks
    alone = (Alone(BEST, count, None, c, width=False) for c in range(count))
    best = min((fitted(one, readings, normal, one.starts()) for one in alone), key=lambda fit: fit.value)
    pools = (PmfPool(PMFS, count), Pool(LOGITS, count), Pool(POOL, count, weighted=True))
    return {BEST: best, **{pool.name: fitted(pool, readings, normal, pool.starts()) for pool in pools}}


def _of_variants(choice: FusionChoice, readings: Readings) -> dict[str, Float[Tensor, "N"]]:
    normal = draws_for(readings, _DRAWS, 1)
    return {name: fit.losses(readings, normal) for name, fit in choice.fits.items()}


def _mean_pmf(seen: Seen) -> Float[Tensor, "N M"]:
    """The deep ensemble, of which nothing is fitted: the mean of softmax ĝ_c."""
    return torch.stack([gaussian.mean.double().softmax(1) for gaussian in seen.gaussians]).mean(0)


def _of_best(held_out: Seen, report: Seen) -> Float[Tensor, "N"]:
    """Of the network whose calibrated posterior is best on the held-out inputs."""
    means = [float(_of_gaussian(one, held_out.labels).mean()) for one in _doubled(held_out)]
    return _of_gaussian(_doubled(report)[means.index(min(means))], report.labels)


def _doubled(seen: Seen) -> list[errbar.LogitGaussian]:
    return [errbar.LogitGaussian(g.mean.double(), FullCovariance(g.covariance)) for g in seen.gaussians]


def _of_gaussian(gaussian: errbar.LogitGaussian, labels: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    return _of_pmf(gaussian.predict(_DRAWS, draws="sobol").pmf.double(), labels)


def _of_pmf(pmf: Float[Tensor, "N M"], labels: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """−ln f_y."""
    return -pmf.gather(1, labels[:, None])[:, 0].clamp_min(torch.finfo(torch.float64).tiny).log()
