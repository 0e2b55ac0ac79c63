"""`calibrate_track`: which options of a `Track` earn their place, by the NLL of held-out sequences after every frame.

Every option is compared with plain precision weighting, sequence by sequence, and taken only where it is better by
more than two standard errors of that difference. With few sequences nothing is, and the default stays. Σ_e for the
sequences of one half is estimated on the other half, so that it is never scored on what it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._base.memory import require_memory
from errbar._base.progress import track as shown
from errbar._calibration.held_out import HeldOut
from errbar._distributions.calibration import Calibration
from errbar._distributions.sampling import require_samples, require_seed
from errbar._fusion.track import (
    Contrasts,
    Track,
    contrasts_of,
    each_sequence,
    growth_of_evidence,
    in_logits,
    option_name,
    precisions_of,
    rounding_of,
    scatter_within,
    squared_distance,
)
from errbar._model.batch import checked_labels
from errbar._posterior.posterior import Posterior, require_posterior
from errbar.errors import DataError, LabelError

DEFAULT = "precision-weighted"
MEMORIES = (0.95, 0.9, 0.8, 0.6)
EVIDENCES = (0.0, 0.1, 0.25, 0.5, 0.75)
# Standard errors by which an option must beat the default: one of ten options is better than that by chance rarely.
_CLEARLY = 2.0
_FLOAT64 = 8


def calibrate_track(
    posterior: Posterior,
    sequences: Iterable[Any],
    labels: Any,
    *,
    samples: int = 300,
    seed: int = 0,
    progress: bool = False,
) -> Track:
    """A `Track` without frames, ready to add to, with the options that held-out sequences ask for.

    Candidates are the default, a `memory` of 0.95, 0.9, 0.8 or 0.6, `evidence` ρ of 0, 0.1, 0.25, 0.5 or 0.75, the
    `noise` of `frame_noise`, and noise with each ρ. The score is the mean NLL over all prefixes of all sequences: after
    one frame, two, and so on. The best candidate is taken if it beats the default by more than two standard errors of
    their difference over sequences; otherwise the default is. `comparison` of the result, which `print` shows, has the
    NLL of each. Then κ of `surprise` is fitted, and the held-out surprises kept for `p_value`.

    Args:
        posterior: the calibrated posterior of the track.
        sequences: an iterable of held-out sequences, each a batch with the frames of one object, in their order.
        labels: the class of each object.
        samples: Monte Carlo draws for the PMFs.
        seed: of those draws.
        progress: show progress with the time left.
    """
    require_posterior(posterior, "calibrate_track")
    require_samples(samples)
    require_seed(seed)
    if labels is None:
        raise LabelError(
            "Labels are missing: expected calibrate_track(posterior, sequences, labels), one per sequence."
        )
    read = list(_read(posterior, sequences, progress))
    if not read:
        raise DataError("There are no sequences; expected at least one, with a label each.")
    task = posterior.information.task
    truth = checked_labels(labels, size=len(read), classes=task.n_classes, device=torch.device("cpu"))
    noise = _Noise.of([means for means, _ in read])
    candidates = _candidates(posterior, noise)
    scorer = _Scorer(posterior, read, truth, noise, samples, seed)
    losses: dict[str, Float[Tensor, "N"]] = {}
    # Options that differ in their evidence alone share all but the last step.
    kinds = [list(kind) for _, kind in groupby(candidates, key=lambda one: (one.noise is None, one.memory))]
    for alike in shown(kinds, "Comparing ways to fuse", enabled=progress):
        losses |= scorer.losses(alike)
    best = _best(losses, [len(means) for means, _ in read])
    chosen = next(one for one in candidates if option_name(one) == best)
    total = sum(len(means) for means, _ in read)
    surprises = torch.cat([_surprises(chosen, *one) for one in read])
    scale = float(surprises.mean()) / (task.n_classes - 1)
    scale = scale if scale > 0 else 1.0
    comparison = {best: losses[best], **losses}
    return chosen.compared_with(
        surprises / scale, {name: float(values.sum()) / total for name, values in comparison.items()}, scale
    )


@dataclass(frozen=True, eq=False)
class _Noise:
    """Σ_e of all sequences on contrasts, and for each half of them that of the other; both of all if one has none."""

    whole: Float[Tensor, "d d"]
    of_others: tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]

    @staticmethod
    def of(means: Sequence[Float[Tensor, "C d"]]) -> _Noise:
        whole = scatter_within(means)
        halves = []
        for first in (1, 0):
            others = means[first::2]
            halves.append(scatter_within(others) if any(len(mean) > 1 for mean in others) else whole)
        return _Noise(whole, (halves[0], halves[1]))

    def in_logits(self) -> Float[Tensor, "M M"]:
        basis = linalg.contrast_basis(len(self.whole) + 1, self.whole.device)
        return linalg.symmetric(basis @ self.whole @ basis.mT)


def _candidates(posterior: Posterior, noise: _Noise) -> list[Track]:
    """The default first; then one option each, and noise with evidence."""
    matrix = noise.in_logits()
    return [
        Track(posterior),
        *(Track(posterior, memory=memory) for memory in MEMORIES),
        *(Track(posterior, evidence=evidence) for evidence in EVIDENCES),
        Track(posterior, noise=matrix),
        *(Track(posterior, noise=matrix, evidence=evidence) for evidence in EVIDENCES),
    ]


def _read(posterior: Posterior, sequences: Iterable[Any], progress: bool) -> Iterator[Contrasts]:
    held = 0
    size = (posterior.information.n_classes - 1) ** 2 * _FLOAT64
    for frames in shown(each_sequence(sequences), "Reading sequences", enabled=progress):
        gaussian = posterior.unrounded_logits(frames)
        held += len(gaussian) * size
        # As much again, several times over, is needed for each comparison.
        require_memory(
            4 * held, torch.device("cpu"), what="The covariances of all frames", instead="Give fewer sequences."
        )
        yield contrasts_of(gaussian)


@dataclass(frozen=True, eq=False)
class _Scorer:
    """−ln f_y after each prefix, summed over the prefixes of each sequence, for any options."""

    posterior: Posterior
    read: Sequence[Contrasts]
    labels: Int[Tensor, "N"]
    noise: _Noise
    samples: int
    seed: int

    def losses(self, alike: Sequence[Track]) -> dict[str, Float[Tensor, "N"]]:
        """By the name of the options, which differ in `evidence` alone."""
        parts = []
        for number, (means, covariances) in enumerate(self.read):
            noise = None if alike[0].noise is None else self.noise.of_others[number % 2]
            parts.append(prefixes(means, covariances, noise, alike[0].memory, rounding_of(self.posterior)))
        weights, fused, spreads = (torch.cat(column) for column in zip(*parts, strict=True))
        return {option_name(one): self._losses(weights, fused, spreads, one.evidence) for one in alike}

    def _losses(
        self,
        weights: Float[Tensor, "n"],
        fused: Float[Tensor, "n d"],
        spreads: Float[Tensor, "n d d"],
        evidence: float | None,
    ) -> Float[Tensor, "N"]:
        lengths = torch.tensor([len(means) for means, _ in self.read])
        growth = torch.as_tensor(growth_of_evidence(weights, evidence), dtype=torch.float64)
        gaussian = in_logits(growth.reshape(-1, 1) * fused, growth.reshape(-1, 1, 1).square() * spreads, self.posterior)
        labels = self.labels.repeat_interleave(lengths).to(gaussian.mean.device)
        held_out = HeldOut(gaussian.mean, gaussian.sampling_root(), labels, gaussian.contrast_variance)
        value, _ = held_out.log_likelihood(Calibration(), held_out.draws(self.samples, self.seed))
        owner = torch.arange(len(lengths)).repeat_interleave(lengths)
        return torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, owner, -value.cpu())


def prefixes(
    means: Float[Tensor, "C d"],
    covariances: Float[Tensor, "C d d"],
    noise: Float[Tensor, "d d"] | None,
    memory: float,
    rounding: float,
) -> tuple[Float[Tensor, "C"], Float[Tensor, "C d"], Float[Tensor, "C d d"]]:
    """W, ĝ and P of a track after each of its frames, on contrasts, all at once: the recursion of `Track.add`."""
    own = covariances if noise is None else covariances + noise
    precisions = precisions_of(own, "The covariance of a frame", rounding)
    vectors = (precisions @ means[:, :, None])[:, :, 0]
    information, vector = torch.zeros_like(precisions), torch.zeros_like(vectors)
    weight = torch.zeros(len(means), dtype=torch.float64)
    for c in range(len(means)):
        before = c - 1 if c else c
        information[c] = memory * information[before] + precisions[c]
        vector[c] = memory * vector[before] + vectors[c]
        weight[c] = memory * weight[before] + 1
    lower, _ = linalg.safe_cholesky(information, name="The information of a track", limit=1e-12)
    spreads = linalg.inverse_from_cholesky(lower)
    return weight, (spreads @ vector[:, :, None])[:, :, 0], spreads


def _best(losses: Mapping[str, Float[Tensor, "N"]], lengths: Sequence[int]) -> str:
    """The candidate of the least NLL, if it is clearly better than the default.

    The difference of the mean NLLs is Σ_n D_n/Σ_n C_n with D_n the sum over the prefixes of a sequence; its variance
    that of a ratio, Σ_n (D_n − C_n D̄)²/(Σ_n C_n)², because the prefixes of one sequence are not independent.
    """
    best = min(losses, key=lambda name: float(losses[name].sum()))
    counts = torch.tensor(lengths, dtype=torch.float64)
    gains = losses[DEFAULT] - losses[best]
    mean = float(gains.sum() / counts.sum())
    error = float((gains - counts * mean).square().sum().sqrt() / counts.sum())
    n = len(lengths)
    # One sequence has no standard error; few have one that is too small.
    is_clear = n > 1 and mean > _CLEARLY * error * math.sqrt(n / (n - 1))
    return best if is_clear else DEFAULT


def _surprises(options: Track, means: Float[Tensor, "C d"], covariances: Float[Tensor, "C d d"]) -> Float[Tensor, "_"]:
    """dᵀS⁻¹d of each frame but the first, against the track of those before it."""
    noise = None if options.noise is None else linalg.contrast_covariance(options.noise)
    _, fused, spreads = prefixes(means, covariances, noise, options.memory, rounding_of(options.posterior))
    own = covariances if noise is None else covariances + noise
    return squared_distance(means[1:] - fused[:-1], own[1:] + spreads[:-1])
