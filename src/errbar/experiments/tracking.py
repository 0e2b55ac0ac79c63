"""Frames of one object: `errbar.Track`, what `calibrate_track` chooses, and the ways to do without them.

The posterior is calibrated on the frames of the held-out sequences, and everything else is fitted to the same
sequences; the NLL after some numbers of frames is reported on others. Sequences in which the object changes halfway
show what `surprise` and `p_value` are worth.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import errbar
from errbar import metrics
from errbar._base.progress import track as shown
from errbar._fusion.track import growth_of_evidence, option_name
from errbar.errors import FusionNotice
from errbar.experiments.sequences import FLOOR, first_frames, joint_logits, tracked

LENGTHS = (1, 2, 3, 5, 10)
TRACK, CHOSEN, LATEST = "Track", "calibrate_track", "latest frame"
PMFS, PRODUCT, LOGITS, JOINT = "mean of PMFs", "product of PMFs", "mean of logits, T and evidence", "joint R"
# What a track must not lose to; and all methods, as tables have them.
BASELINES = (LATEST, PMFS, LOGITS, JOINT, PRODUCT)
METHODS = (*BASELINES, TRACK, CHOSEN)
_CORRELATIONS = tuple(step / 40 for step in range(41))
_LOG_TEMPERATURES = (-3.0, 3.0)
# p-values below which a frame is said not to belong.
LEVELS = (0.05, 0.01, 0.001)
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, eq=False)
class Frames:
    """N sequences of F frames of one object each, with its label."""

    frames: Float[Tensor, "N F ..."]
    labels: Int[Tensor, "N"]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """One for each sequence, every frame with the label of its object."""
        return [(x, y.expand(len(x))) for x, y in zip(self.frames, self.labels, strict=True)]


@dataclass(frozen=True, eq=False)
class Tracking:
    """Length → method → −ln f_y of each sequence; and what was fitted and found."""

    losses: Mapping[int, Mapping[str, Float[Tensor, "N"]]]
    facts: dict[str, Any]


def study(
    posterior: errbar.Posterior,
    held_out: Frames,
    report: Frames,
    *,
    lengths: Sequence[int] = LENGTHS,
    samples: int = 1000,
    seed: int = 0,
    progress: bool = False,
) -> Tracking:
    """Fit to the held-out sequences, and report −ln f_y after so many frames of the others."""
    lengths = [length for length in lengths if length <= report.frames.shape[1]]
    posterior = calibrated(posterior, held_out)
    chosen = errbar.calibrate_track(posterior, held_out.frames, held_out.labels, progress=progress)
    tracks = {TRACK: errbar.Track(posterior), CHOSEN: chosen}
    each = [posterior.logits(sequence).mean.double().cpu() for sequence in held_out.frames]
    T, correlation = evidence(torch.stack(each), held_out.labels.cpu())
    pmfs: dict[str, list[Tensor]] = {}
    for x in shown(list(report.frames), "Fusing frames", enabled=progress):
        for name, pmf in _pmfs(tracks, x, lengths, (T, correlation), samples, seed).items():
            pmfs.setdefault(name, []).append(pmf)
    labels = report.labels.cpu()
    stacked = {name: torch.stack(each) for name, each in pmfs.items()}
    losses = {
        length: {name: _loss(pmf[:, place], labels) for name, pmf in stacked.items()}
        for place, length in enumerate(lengths)
    }
    facts = {
        "sequences": len(labels),
        "calibration": {"temperature": posterior.temperature, "covariance_scale": posterior.covariance_scale},
        "option": option_name(chosen),
        "comparison": dict(chosen.comparison or {}),
        "evidence": {"temperature": T, "correlation": correlation},
        "accuracy": {
            name: [metrics.accuracy(pmf[:, place], labels) for place in range(len(lengths))]
            for name, pmf in stacked.items()
        },
        "change": changes(chosen, report, seed=seed),
    }
    return Tracking(losses, facts)


def calibrated(posterior: errbar.Posterior, held_out: Frames) -> errbar.Posterior:
    """T and T_c by the NLL of single frames of the held-out sequences."""
    with warnings.catch_warnings():
        # T_c at its bound is not a warning here; the result has its value.
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        return errbar.calibrate(posterior, held_out.batches())


def _pmfs(
    tracks: Mapping[str, errbar.Track],
    x: Float[Tensor, "F ..."],
    lengths: Sequence[int],
    fitted: tuple[float, float],
    samples: int,
    seed: int,
) -> dict[str, Float[Tensor, "L M"]]:
    """PMFs of each method after so many frames of one sequence."""
    posterior = tracks[TRACK].posterior
    joint = joint_logits(posterior, x)
    own = joint.marginals()
    each = own.predict(samples, seed).pmf.double()
    counts = torch.arange(1, len(each) + 1, dtype=torch.float64)[:, None]
    T, correlation = fitted
    means = own.mean.double().cumsum(0) / counts
    with warnings.catch_warnings():
        # The comparison is what shows it.
        warnings.simplefilter("ignore", FusionNotice)
        joined = [errbar.fuse_frames(first_frames(joint, length)).predict(samples, seed).pmf[0] for length in lengths]
    rows = torch.tensor(lengths) - 1
    results = {
        LATEST: each[rows],
        PMFS: (each.cumsum(0) / counts)[rows],
        PRODUCT: each.clamp_min(FLOOR).log().cumsum(0).softmax(1)[rows],
        LOGITS: (growth_of_evidence(counts, correlation) * means / T).softmax(1)[rows],
        JOINT: torch.stack(joined).double(),
    }
    for name, prefixes in tracked(tracks, [x]).items():
        found = [prefixes[length - 1].predict(samples, seed).pmf[0] for length in lengths]
        results[name] = torch.stack(found).double().cpu()
    return results


def _loss(pmf: Float[Tensor, "N M"], labels: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """−ln f_y; probabilities are at least `FLOOR`."""
    floored = pmf.clamp_min(FLOOR)
    floored = floored / floored.sum(1, keepdim=True)
    return -floored.gather(1, labels[:, None])[:, 0].log()


def evidence(logits: Float[Tensor, "N F M"], labels: Int[Tensor, "N"]) -> tuple[float, float]:
    """T and ρ with the least NLL of softmax(κ_C ḡ_C/T) over all prefixes, ḡ_C the mean of the first C logits.

    ρ in steps of 1/40, and for each the best T by golden sections: the NLL is a convex function of 1/T.
    """
    counts = torch.arange(1, logits.shape[1] + 1, dtype=torch.float64)[:, None]
    means = logits.double().cumsum(1) / counts
    index = labels[:, None, None].expand(-1, logits.shape[1], 1)

    def nll(log_T: float, correlation: float) -> float:
        grown = growth_of_evidence(counts, correlation) * means * math.exp(-log_T)
        return -float(grown.log_softmax(2).gather(2, index).mean())

    def best_temperature(correlation: float) -> float:
        low, high = _LOG_TEMPERATURES
        while high - low > 1e-3:
            width = _GOLDEN * (high - low)
            if nll(high - width, correlation) < nll(low + width, correlation):
                high = low + width
            else:
                low = high - width
        return (low + high) / 2

    found = ((correlation, best_temperature(correlation)) for correlation in _CORRELATIONS)
    correlation, log_T = min(found, key=lambda pair: nll(pair[1], pair[0]))
    return math.exp(log_T), correlation


# --------------------------------------------------------------------------------------------- an object that changes


def changes(track: errbar.Track, report: Frames, *, seed: int = 0) -> dict[str, Any]:
    """Sequences whose object becomes another one, of another class, halfway: who notices, and how soon.

    From frame F/2 + 1 on the frames are those of another sequence at the same place, so that what changes is the object
    and not how near it is. `auroc`: the first frame after the change against the same frame of the sequence itself, by
    surprise, and for comparison by how little the PMFs of frame and track agree, 1 − Σ_m f_m f'_m. For each level,
    frames are added until one has a p-value below it: `delay` counts frames from the change, 1 for the first, over
    those that are noticed; `false_alarms` are sequences without a change in which some frame is refused.
    """
    posterior = track.posterior
    count, length = report.frames.shape[:2]
    half = length // 2
    if half < 1 or len(report.labels.unique()) < 2:
        return {}
    partner = _partners(report.labels.cpu(), seed)
    each = [posterior.unrounded_logits(x) for x in report.frames]
    pmfs = [own.rounded().predict().pmf.double().cpu() for own in each]
    scores: dict[str, list[list[float]]] = {"surprise": [[], []], "disagreement of PMFs": [[], []]}
    noticed: dict[float, list[int | None]] = {level: [] for level in LEVELS}
    false_alarms = dict.fromkeys(LEVELS, 0)
    for number in range(count):
        before = track
        for frame in range(half):
            before = before.add(each[number][frame : frame + 1])
        pmf = before.predict().pmf[0].double().cpu()
        for is_other, source in enumerate((number, partner[number])):
            scores["surprise"][is_other].append(before.surprise(each[source][half : half + 1]))
            scores["disagreement of PMFs"][is_other].append(1 - float(pmf @ pmfs[source][half]))
        own_values = _p_values(track, each[number])
        values = _p_values(before, each[partner[number]][half:])
        for level in LEVELS:
            noticed[level].append(next((place + 1 for place, p in enumerate(values) if p < level), None))
            false_alarms[level] += any(p < level for p in own_values)
    return {
        "auroc": {name: metrics.auroc(*_labelled(*pair)) for name, pair in scores.items()},
        "levels": [
            {
                "level": level,
                "noticed": sum(delay is not None for delay in delays) / count,
                "at_once": sum(delay == 1 for delay in delays) / count,
                "delay": _mean([delay for delay in delays if delay is not None]),
                "false_alarms": false_alarms[level] / count,
            }
            for level, delays in noticed.items()
        ],
        "frames_after_the_change": length - half,
    }


def _p_values(track: errbar.Track, frames: errbar.LogitGaussian) -> list[float]:
    """Of each frame given the ones before it, all of which are added."""
    values = []
    for frame in range(len(frames)):
        one = frames[frame : frame + 1]
        if track.frames:
            values.append(track.p_value(one))
        track = track.add(one)
    return values


def _partners(labels: Int[Tensor, "N"], seed: int) -> list[int]:
    """For each sequence another one of another class, at random."""
    generator = torch.Generator().manual_seed(seed)
    partners = []
    for label in labels.tolist():
        others = (labels != label).nonzero()[:, 0]
        partners.append(int(others[int(torch.randint(len(others), (1,), generator=generator))]))
    return partners


def _labelled(own: Sequence[float], other: Sequence[float]) -> tuple[Tensor, Tensor]:
    scores = torch.tensor([*own, *other], dtype=torch.float64)
    return scores, torch.arange(len(scores)) >= len(own)


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
