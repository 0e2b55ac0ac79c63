"""`HeldOut`: the logit Gaussians of held-out inputs, from which every calibration is scored without the network.

A label that is true or false by itself is two classes with the logits 0 and g, and the NLL of several labels is that of
each. So of several labels every one that is given is an input here, with two classes: (−g/2, g/2) without their mean.

ĝ and a root of P^g of each input are read once. The draws are shared by all inputs and all trial values, so every score
is a smooth deterministic function of ln T, ln T_c and ln c. Log-probabilities never underflow, so the NLL is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.execution import plain_execution
from errbar._base.linalg import exp_without_subnormals_, softmax_without_subnormals_
from errbar._calibration.overlap import Overlap
from errbar._calibration.position_rows import chosen_positions
from errbar._curvature.task import Task
from errbar._distributed.shards import opened
from errbar._distributed.team import Team
from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import SamplingRoot, normal_quantiles
from errbar._model.batch import Batch, Unpack
from errbar._posterior.posterior import Posterior
from errbar._posterior.pushing import held_draws, keeps_draws, require_room
from errbar.errors import DataError, LabelError

# Bytes of the samples made at a time: on a CPU they should fit in the cache, a GPU needs few large launches.
_BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**29}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """ĝ, a root of P^g, v̄ (all without calibration) and the label of each held-out input.

    `column` says which of several labels each is, and is None for classes. `watch` is called before each look at all
    inputs, and may raise to end a search.
    """

    mean: Float[Tensor, "N M"]
    root: SamplingRoot
    labels: Int[Tensor, "N"]
    variance: Float[Tensor, "N"]
    column: Int[Tensor, "N"] | None = None
    watch: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def parts(self) -> dict[str, Tensor]:
        """What is different for each input, by name."""
        parts = {"mean": self.mean, "root": self.root.values, "labels": self.labels, "variance": self.variance}
        return parts if self.column is None else parts | {"column": self.column}

    def chosen(self, rows: Int[Tensor, "n"]) -> HeldOut:
        """Some of the inputs, in this order."""
        root = replace(self.root, values=self.root.values[rows])
        column = None if self.column is None else self.column[rows]
        return HeldOut(self.mean[rows], root, self.labels[rows], self.variance[rows], column, self.watch)

    def of_label(self, label: int) -> HeldOut:
        """The inputs for which one of several labels is given."""
        assert self.column is not None
        return self.chosen((self.column == label).nonzero()[:, 0])

    def keeping(self, samples: int, seed: int) -> HeldOut:
        """The same with these draws of the logits held, where that is quicker than to make them again."""
        return replace(self, root=self.root.keeping(samples, seed, self.mean))

    def draws(self, samples: int, seed: int) -> Float[Tensor, "d K"]:
        """The draws of `predict`; where an input has one alone, as of two classes or a label, quantiles in their place.

        One draw for all inputs has no average over directions: of 1000 random ones the NLL of a label was off by 3e-3
        nats, and its T_c was 1 or 8 with the seed. Quantiles give the integral over N(0, 1) itself.
        """
        if self.root.is_of_one_draw:
            return normal_quantiles(samples, seed, self.mean)
        return self.root.draws(samples, seed, self.mean)

    def spread(self) -> float:
        """The mean variance of a contrast, over inputs and contrasts."""
        return float(self.root.squares().mean()) / (self.mean.shape[1] - 1)

    def typical_variance(self) -> float:
        """The median of v̄ over the inputs."""
        return float(self.variance.median())

    def _blocks(
        self, at: Calibration, normal: Float[Tensor, "d K"]
    ) -> Iterator[tuple[slice, Float[Tensor, "b M K"], Float[Tensor, "b M"]]]:
        """Rows, √T_c A z/T(x) and ĝ/T(x); their sum are the samples of the logits."""
        if self.watch is not None:
            self.watch()
        limit = _BLOCK_BYTES.get(self.mean.device.type, _BLOCK_BYTES["cpu"])
        size = max(1, limit // (self.mean.shape[1] * normal.shape[1] * self.mean.element_size()))
        for start in range(0, len(self.mean), size):
            rows = slice(start, start + size)
            scale = math.sqrt(at.covariance_scale) / at.temperature
            if at.softening == 0:
                yield rows, self.root.spread(rows, normal, scale), self.mean[rows] / at.temperature
                continue
            # T/T(x) of each input.
            share = (at.temperature / at.temperatures(self.variance[rows])).to(self.mean)
            spread = self.root.spread(rows, normal, scale)
            spread *= share[:, None, None]
            yield rows, spread, self.mean[rows] / at.temperature * share[:, None]

    def _softening_slope(self, at: Calibration) -> Float[Tensor, "N"]:
        """∂ ln T(x)/∂ ln c = ½ c v̄/(1 + c v̄)."""
        excess = at.softening * self.variance
        return excess / (2 * (1 + excess))

    def log_likelihood(
        self, at: Calibration, normal: Float[Tensor, "d K"], names: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "N"], dict[str, Float[Tensor, "N"]]]:
        """ln f_y of each input and its derivatives by those of ln T, ln T_c and ln c that are named; float64.

            ln f_y = ln Σ_k exp(l_k) − ln K,   l_k = g_y − ln Σ_m exp(g_m) of draw k,
            ∂ ln f_y/∂τ = Σ_k w_k (ġ_y − Σ_m f_m ġ_m),   w = softmax(l),

        with g = (ĝ + √T_c A z)/T(x) and ġ = −g for τ = ln T, ½ √T_c A z/T(x) for τ = ln T_c; that by ln c is the one by
        ln T times ∂ ln T(x)/∂ ln c. No probability is formed, so none can underflow, and no objective can become
        infinite.
        """
        if at.covariance_scale == 0:
            normal = normal[:, :1]
        value = self.mean.new_empty(len(self.mean), dtype=torch.float64)
        needed = [name for name in ("temperature", "covariance_scale") if name in names]
        if "softening" in names and "temperature" not in names:
            needed.insert(0, "temperature")
        slopes = {name: torch.empty_like(value) for name in needed}
        for rows, spread, mean in self._blocks(at, normal):
            label = self.labels[rows, None, None]
            spread_of_label = spread.gather(1, label.expand(-1, 1, spread.shape[2]))[:, 0]
            mean_of_label = mean.gather(1, label[:, 0])
            weights = spread + mean[:, :, None]
            top = weights.amax(1, keepdim=True)
            weights -= top
            exp_without_subnormals_(weights)
            total = weights.sum(1)
            log_share = (spread_of_label + mean_of_label - top[:, 0]).double() - total.double().log()
            value[rows] = torch.logsumexp(log_share, 1) - math.log(normal.shape[1])
            if not needed:
                continue
            share = torch.softmax(log_share, 1)
            along_mean = mean_of_label - (mean[:, None, :] @ weights)[:, 0] / total
            along_spread = spread_of_label - (weights.mul_(spread)).sum(1) / total
            for name in needed:
                velocity = along_spread / 2 if name == "covariance_scale" else -(along_mean + along_spread)
                slopes[name][rows] = (share * velocity).sum(1)
        if "softening" in names:
            slopes["softening"] = slopes["temperature"] * self._softening_slope(at)
        return value, {name: slopes[name] for name in names}

    def nll(self, at: Calibration, normal: Float[Tensor, "d K"]) -> float:
        return -float(self.log_likelihood(at, normal)[0].mean())

    def pmf(
        self, at: Calibration, normal: Float[Tensor, "d K"], names: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "N M"], dict[str, Float[Tensor, "N M"]]]:
        """The PMF and its derivatives by those of ln T, ln T_c and ln c that are named.

        With g = (ĝ + √T_c A z)/T(x): ∂f/∂τ = f ∘ (ġ − fᵀġ), where ġ is that of `log_likelihood`.
        """
        if at.covariance_scale == 0:
            normal = normal[:, :1]
        pmf = torch.empty_like(self.mean)
        slopes = {name: torch.empty_like(self.mean) for name in names}
        for rows, spread, mean in self._blocks(at, normal):
            # Without slopes the spread is not needed again, and its memory is in the cache.
            logits = spread + mean[:, :, None] if names else spread.add_(mean[:, :, None])
            values = softmax_without_subnormals_(logits)
            pmf[rows] = values.mean(2)
            if not names:
                continue
            product_with_spread = spread.mul_(values)
            total, along = product_with_spread.mean(2), product_with_spread.sum(1)
            for name in names:
                if name == "covariance_scale":
                    first, expected = total / 2, along / 2
                else:
                    first, expected = -(total + mean * pmf[rows]), -(along + (mean[:, None, :] @ values)[:, 0])
                slopes[name][rows] = first - (values @ expected[:, :, None])[:, :, 0] / values.shape[2]
        if "softening" in names:
            slopes["softening"] *= self._softening_slope(at).to(pmf)[:, None]
        return pmf, slopes


def read_held_out(
    posterior: Posterior, data: Any, unpack: Unpack | None, progress: bool, team: Team, samples: int, seed: int
) -> HeldOut:
    """The held-out inputs of all ranks, in the order of ranks, on every rank, for so many draws. A collective call."""
    overlap = Overlap(posterior.information)
    stream = overlap.watching(opened(data, unpack, team, title="Calibrating", progress=progress))
    own = team.together(lambda: held_out_of(posterior, stream, samples, seed))
    overlap.warn(team, stacklevel=3)
    whole = gathered(None if own is None else [own], posterior.information.task, team, samples)[0]
    return whole.keeping(samples, seed)


def gathered(own: Sequence[HeldOut] | None, task: Task, team: Team, samples: int) -> list[HeldOut]:
    """What several ranks have read, one after the other, on every rank; None for a rank without data, and of several
    posteriors at once. A collective call."""
    device = task.network.device
    counts = team.exchange(0 if own is None else len(own))
    if not any(counts):
        given = "" if task.kind.has_gauge else " with labels that are not missing"
        if task.positions is not None:
            given = f" in which a position has a label other than {task.positions.ignore_index}"
        raise DataError(f"The data for calibration are empty: expected at least one batch{given}.")
    if team.is_alone and own is not None:
        return list(own)
    # One posterior has one basis, which a rank without data lacks: take that of the first rank with data.
    first = next(rank for rank, count in enumerate(counts) if count)
    results = []
    for index in range(counts[first]):
        one = None if own is None else own[index]
        rows = team.gathered(None if one is None else one.parts(), device)
        common = {} if one is None or first != team.rank else one.root.common()
        kept = task.kind.has_gauge and keeps_draws(task, samples)
        root = SamplingRoot(rows["root"], **team.gathered(common, device), kept=kept)
        results.append(HeldOut(rows["mean"], root, rows["labels"], rows["variance"], rows.get("column")))
    return results


def held_out_of(posterior: Posterior, stream: Iterator[Batch], samples: int, seed: int) -> HeldOut | None:
    """This rank's part of the held-out inputs; None if it has none."""
    plain = posterior.uncalibrated()
    gaussians: list[LogitGaussian] = []
    labels: list[Tensor] = []
    if posterior.information.task.positions is not None:
        gaussians, labels = chosen_positions(posterior, stream, samples, seed)
        return held_out_of_gaussians(gaussians, labels) if gaussians else None
    for batch in stream:
        require_room(posterior.information.task, sum(map(len, gaussians)), len(batch), samples)
        gaussian = plain.sampling_logits(batch, samples, seed)
        gaussians.append(gaussian)
        labels.append(labels_for(gaussian, batch))
    held_out = held_out_of_gaussians(gaussians, labels) if gaussians else None
    # Of several labels all may be missing.
    return held_out if held_out is not None and len(held_out) else None


def labels_for(gaussian: LogitGaussian, batch: Batch) -> Int[Tensor, "B *L"]:
    size, columns = gaussian.mean.shape
    return gaussian.kind.labels_of(batch.labels, size=size, columns=columns, device=gaussian.mean.device)


def held_out_of_gaussians(gaussians: Sequence[LogitGaussian], labels: Sequence[Int[Tensor, "B *L"]]) -> HeldOut:
    """Held-out inputs from their logits without calibration, batch by batch."""
    if not gaussians[0].kind.has_gauge:
        return _held_out_of_labels(gaussians, torch.cat(list(labels)))
    mean = torch.cat([gaussian.mean - gaussian.mean.mean(1, keepdim=True) for gaussian in gaussians])
    root = SamplingRoot.concatenated([gaussian.sampling_root() for gaussian in gaussians])
    variance = torch.cat([gaussian.contrast_variance.double() for gaussian in gaussians])
    return HeldOut(mean, root, torch.cat(list(labels)), variance)


def _held_out_of_labels(gaussians: Sequence[LogitGaussian], labels: Int[Tensor, "B L"]) -> HeldOut:
    """Every label that is given, as two classes of its own."""
    row, column = (labels >= 0).nonzero(as_tuple=True)
    mean = torch.cat([gaussian.mean for gaussian in gaussians])[row, column]
    variance = torch.cat([gaussian.variance for gaussian in gaussians])[row, column].clamp_min(0)
    halves = torch.tensor([-0.5, 0.5], dtype=mean.dtype, device=mean.device)
    # With the sign that the contrast of two classes has, so that a single label has their draws.
    root = SamplingRoot((variance.sqrt().to(mean.dtype)[:, None] * -halves)[:, :, None])
    return HeldOut(mean[:, None] * halves, root, labels[row, column], variance.double() / 2, column)


def held_out_nll(posterior: Posterior, data: Sequence[Batch], samples: int, seed: int) -> float:
    """−(1/N) Σ_n ln f_y, finite even where a probability would underflow."""
    samples = held_draws(posterior.information.task, samples)
    total, count = 0.0, 0
    for batch in data:
        part = held_out_of(posterior, iter([batch]), samples, seed)
        if part is None:
            continue
        with plain_execution(part.mean.device):
            normal = part.draws(samples, seed)
            total -= float(part.log_likelihood(posterior.calibration, normal)[0].sum())
        count += len(part)
    if count == 0:
        raise LabelError("All labels of the held-out data are missing (−1); expected some that are 0 or 1.")
    return total / count
