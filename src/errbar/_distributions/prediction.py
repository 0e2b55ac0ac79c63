"""`Prediction`: the PMF of each input with its error bars, from Monte Carlo samples of the logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base.execution import graph_execution, plain_execution
from errbar._base.quantiles import quantiles
from errbar._distributions.sampling import (
    GaussianSampler,
    GivenSampler,
    Replicable,
    Sampler,
    blocks,
    covariance_of_draws,
    error_of_draws,
    error_of_pairs,
    mean_over_draws,
    over_blocks,
    std_of_draws,
)
from errbar._distributions.shown import frame_of, html_of, plain_html, text_of, text_of_labels
from errbar.errors import ArgumentError

# Sobol sequences that the Monte Carlo error is estimated from: its relative error is 1/√30.
_REPLICATES = 16


@dataclass(frozen=True, eq=False)
class Prediction:
    """PMFs f̂(x|T) = (1/K) Σ_k f⁽ᵏ⁾ of B inputs, and all statistics of their samples.

    `jitter` is the largest share of its mean diagonal that a logit covariance needed to be factorised.
    """

    pmf: Float[Tensor, "B M"]
    sampler: Sampler
    jitter: float = 0.0

    @staticmethod
    def from_sampler(sampler: Sampler, jitter: float = 0.0) -> Prediction:
        return Prediction(mean_over_draws(sampler), sampler, jitter)

    def __len__(self) -> int:
        return self.sampler.rows

    def __getitem__(self, rows: int | slice | Sequence[int] | Sequence[bool] | Tensor) -> Prediction:
        """The prediction of some inputs: a slice, a mask, positions, or one position, as a batch of one."""
        chosen = self._checked_rows(rows)
        return type(self)(self.pmf[chosen], self.sampler.chosen(chosen), self.jitter)

    def __iter__(self) -> Iterator[Prediction]:
        """Input by input, each as a batch of one."""
        return (self[row : row + 1] for row in range(len(self)))

    def _checked_rows(self, rows: Any) -> slice | Tensor:
        count = len(self)
        if isinstance(rows, slice):
            # Tensors take no negative steps.
            return torch.arange(count, device=self.pmf.device)[[*range(*rows.indices(count))]]
        try:
            given = torch.as_tensor(rows, device=self.pmf.device)
        except (TypeError, ValueError, RuntimeError):
            given = self.pmf.new_empty(())
        if given.numel() == 0 and given.ndim == 1 and given.dtype != torch.bool:
            return given.long()  # an empty list has no dtype of its own
        if given.dtype == torch.bool:
            fits = given.shape == (count,)
        elif given.is_floating_point() or given.is_complex() or given.ndim > 1:
            fits = False
        else:
            given = given.long().reshape(-1)
            fits = bool(((given >= -count) & (given < count)).all())
        if not fits:
            shown = " ".join(str(rows).split())[:60]
            raise ArgumentError(
                f"A prediction of {count} inputs was indexed with {shown}; expected a slice, a whole number "
                f"from {-count} to {count - 1}, several of these, or a mask of {count} truth values."
            )
        return given

    def __repr__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self)

    def to_pandas(self, level: float = 0.95) -> Any:
        """A `pandas.DataFrame` with a row for each input; needs pandas.

        Columns: `label`, `confidence`, `entropy` and `mutual_information`, and of each class m `pmf_m`, `std_m`, and
        the ends `lower_m` and `upper_m` of its interval at `level`.
        """
        return frame_of(self, level)

    @cached_property
    def covariance(self) -> Float[Tensor, "B M M"]:
        """P^f = (1/K) Σ_k (f⁽ᵏ⁾ − f̂)(·)ᵀ, computed when it is read."""
        return over_blocks(self.sampler, covariance_of_draws, self.sampler.classes, self.sampler.classes)

    @cached_property
    def std(self) -> Float[Tensor, "B M"]:
        """√diag P^f, without making P^f."""
        return over_blocks(self.sampler, std_of_draws, self.sampler.classes)

    def std_of(self, weights: Float[Tensor, "A M"]) -> Float[Tensor, "B A"]:
        """√(cᵀ P^f c) for each row c of `weights`: the standard deviation of cᵀf, without making P^f."""
        return over_blocks(self.sampler, lambda f: std_of_draws(weights @ f), len(weights))

    @cached_property
    def label(self) -> Int[Tensor, "B"]:
        """The most likely class."""
        return self.pmf.argmax(1)

    @cached_property
    def confidence(self) -> Float[Tensor, "B"]:
        """The probability of the most likely class."""
        return self.pmf.amax(1)

    @cached_property
    def standard_error(self) -> Float[Tensor, "B M"]:
        """The Monte Carlo error of the PMF: an estimate of the standard deviation of f̂ over seeds.

        More samples make it smaller; they do not change std. Its square has the variance of f̂ as its expectation:
        - "random" draws are independent: Σ_k (f⁽ᵏ⁾ − f̂)²/(K(K − 1));
        - "antithetic" draws are independent in pairs, so it is that of the means of the pairs. Where f is an even
          function of z, as it nearly is where classes are alike, both draws of a pair are equal, and the error is up to
          √2 times that of random draws;
        - "sobol" points all depend on each other: the PMF is computed for 16 further sequences with seeds of their
          own, at the cost of 16 predictions when this is read, and the variance of these is taken.
        NaN where the draws cannot show it: from one sample, or from one antithetic pair.
        """
        sampler = self.sampler
        if isinstance(sampler, Replicable) and sampler.draws == "sobol":
            pmfs = [mean_over_draws(other) for other in sampler.replicates(_REPLICATES)]
            return torch.stack(pmfs, 2).var(2).sqrt()
        error = error_of_pairs if sampler.draws == "antithetic" else error_of_draws
        return over_blocks(sampler, error, sampler.classes)

    @cached_property
    def entropy(self) -> Float[Tensor, "B"]:
        """H(f̂) in nats: the total uncertainty about the class."""
        return entropy_of(self.pmf)

    @cached_property
    def mutual_information(self) -> Float[Tensor, "B"]:
        """H(f̂) − (1/K) Σ_k H(f⁽ᵏ⁾) in nats: the part of the entropy that comes from the parameters.

        The difference loses its digits where both entropies are nearly the same. It is computed as
            (1/K) Σ_k Σ_m f̂_m φ(f_m⁽ᵏ⁾/f̂_m),     φ(r) = r ln r − r + 1 ≥ 0,
        which is the same because Σ_m f_m = Σ_m f̂_m = 1; rounding of f and f̂ enters it in second order.
        """
        execution = graph_execution if self.pmf.requires_grad else plain_execution
        with execution(self.pmf.device):
            parts = [
                _mutual_information(self.sampler.block(start, stop), self.pmf[start:stop])
                for start, stop in blocks(self.sampler)
            ]
            return torch.cat(parts) if parts else self.pmf.new_empty(0)

    def risk(self, threshold: float | Float[Tensor, "M"]) -> Float[Tensor, "B M"]:
        """r_m = Pr{f_m > γ_m} ≈ (1/K) Σ_k 1(f_m⁽ᵏ⁾ > γ_m), for one threshold or one per class."""
        try:
            limit = torch.as_tensor(threshold, dtype=self.pmf.dtype, device=self.pmf.device)
        except (TypeError, ValueError, RuntimeError):
            limit = self.pmf.new_full((), torch.nan)
        if limit.shape not in ((), (self.sampler.classes,)) or not bool(((limit >= 0) & (limit <= 1)).all()):
            raise ArgumentError(
                f"The risk threshold is {threshold!r}; expected a probability, or one for each of the "
                f"{self.sampler.classes} classes."
            )
        limits = limit.expand(self.sampler.classes)[:, None]
        return over_blocks(self.sampler, lambda f: (f > limits).to(f.dtype).mean(2), self.sampler.classes)

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
        """Equal-tailed intervals that hold f_m with probability `level`: (lower, upper)."""
        require_level(level)
        tails = (1 - level) / 2, (1 + level) / 2
        both = over_blocks(self.sampler, lambda f: quantiles(f, tails), self.sampler.classes, 2)
        return both[..., 0], both[..., 1]

    def samples(self) -> Float[Tensor, "B K M"]:
        """All samples f⁽ᵏ⁾; B·K·M numbers."""
        return over_blocks(self.sampler, lambda f: f.mT, self.sampler.samples, self.sampler.classes)


class LabelPrediction(Prediction):
    """The probabilities f̂_l = (1/K) Σ_k σ(g_l⁽ᵏ⁾) of L labels of B inputs, and all statistics of their samples.

    Labels are true or false by themselves, so `pmf` (B, L) holds the probability that each is true, and rows do not
    sum to one. `covariance`, `std`, `standard_error`, `risk`, `interval` and `samples` are those of these
    probabilities; `label`, `confidence`, `entropy` and `mutual_information` have a number for each label.
    """

    def __repr__(self) -> str:
        return text_of_labels(self)

    def _repr_html_(self) -> str:
        return plain_html(text_of_labels(self))

    @cached_property
    def complement(self) -> Float[Tensor, "B L"]:
        """The probability that each label is false, (1/K) Σ_k σ(−g_l⁽ᵏ⁾): in float32 `pmf` is 1 above a logit of 17."""
        sampler = self.sampler
        assert isinstance(sampler, (GaussianSampler, GivenSampler))
        return mean_over_draws(sampler.complement())

    @cached_property
    def label(self) -> Int[Tensor, "B L"]:
        """1 for the labels that are more likely true than not, 0 for the others."""
        return (self.pmf > 0.5).long()

    @cached_property
    def confidence(self) -> Float[Tensor, "B L"]:
        """The probability of `label`: max(f̂_l, 1 − f̂_l)."""
        return torch.maximum(self.pmf, 1 - self.pmf)

    @cached_property
    def entropy(self) -> Float[Tensor, "B L"]:
        """−f̂ ln f̂ − (1 − f̂) ln(1 − f̂) of each label, in nats."""
        entropy: Tensor = entropy_of(_both(self.pmf).flatten(0, 1))
        return entropy.reshape(self.pmf.shape)

    @cached_property
    def mutual_information(self) -> Float[Tensor, "B L"]:
        """The part of the entropy of each label that comes from the parameters, in nats."""

        def each(start: int, stop: int) -> Float[Tensor, "b L"]:
            pmf = _both(self.pmf[start:stop])
            values = _both(self.sampler.block(start, stop))
            return _mutual_information(values.flatten(0, 1), pmf.flatten(0, 1)).reshape(pmf.shape[:2])

        execution = graph_execution if self.pmf.requires_grad else plain_execution
        with execution(self.pmf.device):
            parts = [each(start, stop) for start, stop in blocks(self.sampler)]
            return torch.cat(parts) if parts else self.pmf.new_empty(self.pmf.shape)


def prediction_of(sampler: Sampler, jitter: float = 0.0) -> Prediction:
    """The prediction of the kind that the sampler is of."""
    kind = Prediction if sampler.kind.has_gauge else LabelPrediction
    return kind(mean_over_draws(sampler), sampler, jitter)


def _both(probability: Float[Tensor, "b L *K"]) -> Float[Tensor, "b L 2 *K"]:
    """That a label is false and that it is true, as two classes."""
    return torch.stack([1 - probability, probability], 2)


def require_level(level: float) -> None:
    if not isinstance(level, (int, float)) or not 0 < level < 1:
        raise ArgumentError(f"The level of the interval is {level!r}; expected a number between 0 and 1.")


def entropy_of(pmf: Float[Tensor, "b M"]) -> Float[Tensor, "b"]:
    """−Σ_m f_m ln f_m, with ln f of the most likely class from the sum of the others.

    Where that is small, f itself has no digits left: 1 − 10⁻⁸ is 1 in float32.
    """
    top, label = pmf.max(1, keepdim=True)
    others = pmf.scatter(1, label, 0.0)
    # `top` and not 1 − Σ others, which would hide NaN in a single class.
    return -torch.xlogy(others, others).sum(1) - top[:, 0] * torch.log1p(-others.sum(1))


def _mutual_information(values: Float[Tensor, "b M K"], pmf: Float[Tensor, "b M"]) -> Float[Tensor, "b"]:
    """(1/K) Σ_k Σ_m f̂_m φ(r), r = f_m⁽ᵏ⁾/f̂_m, with φ(r) = (1 + u) ln(1 + u) − u of u = r − 1."""
    kind = torch.finfo(values.dtype)
    scale = pmf.clamp_min(kind.tiny)
    ratio = values / scale[:, :, None]
    excess = ratio - 1
    # r = 0 has φ = 1; its logarithm is kept finite, since 0 · ∞ is NaN.
    terms = excess.clamp_min(kind.eps / 2 - 1).log1p_()
    terms *= ratio
    terms -= excess
    return (terms.mean(2) * scale).sum(1).clamp_min(0)
