"""Logits and predictions of many positions (tokens, pixels), whose Gaussians are made for some of them at a time.

A picture of 512 × 512 has a quarter of a million positions, and P^g of all of them would take M² numbers each. What is
kept are the inputs of the last layer, or draws of the logits; Gaussians are made from them when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import Prediction
from errbar._distributions.sampling import BLOCK_BYTES, GaussianSampler, mean_over_draws, require_samples, require_seed
from errbar._distributions.shown import plain_html, text_of_positions
from errbar._model.outputs import CLASSES, OutputKind
from errbar._model.positions import IGNORE_INDEX
from errbar.errors import ArgumentError

# From the first row to the one after the last: the Gaussians of some positions, calibrated.
GaussiansOf = Callable[[int, int], LogitGaussian]
# Positions whose covariances are made at a time: at least so many, so that products are worth their while.
_AT_A_TIME = 2048
# Numbers of the covariances that are made at a time.
_COVARIANCE_NUMBERS = 2**22
# Bytes of roots of covariances, beside those of the last rows, that are kept for the next statistic.
_KEPT_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class PositionSampler:
    """Samples f⁽ᵏ⁾ of rows whose Gaussians are made for some at a time; the draws are the same for all rows."""

    gaussians_of: GaussiansOf
    rows: int
    classes: int
    samples: int
    seed: int
    draws: str
    like: Tensor
    kind: OutputKind = CLASSES
    # The samplers of the last rows that were asked for, by where they start: statistics ask for neighbours, and of few
    # positions for all of them again.
    _last: dict[int, GaussianSampler] = field(default_factory=dict, init=False, repr=False)
    _jitter: list[float] = field(default_factory=lambda: [0.0], init=False, repr=False)

    @property
    def jitter(self) -> float:
        """The largest that was needed so far."""
        return self._jitter[0]

    def block(self, start: int, stop: int) -> Float[Tensor, "b M K"]:
        parts = [sampler.block(*rows) for sampler, rows in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mean_block(self, start: int, stop: int) -> Float[Tensor, "b M"]:
        return torch.cat([sampler.mean_block(*rows) for sampler, rows in self._parts(start, stop)])

    def chosen(self, rows: slice | Tensor) -> PositionSampler:
        """Some of the rows, whose Gaussians are made in runs of neighbours."""
        numbers = torch.arange(self.rows)[rows.cpu() if isinstance(rows, Tensor) else rows]

        def gaussians_of(start: int, stop: int) -> LogitGaussian:
            wanted = numbers[start:stop]
            ends = ((wanted.diff() != 1).nonzero()[:, 0] + 1).tolist()
            runs = zip([0, *ends], [*ends, len(wanted)], strict=True)
            parts = [self.gaussians_of(int(wanted[first]), int(wanted[last - 1]) + 1) for first, last in runs]
            return LogitGaussian.concatenated(parts)

        return replace(self, gaussians_of=gaussians_of, rows=len(numbers))

    def replicates(self, count: int) -> Iterator[PositionSampler]:
        """The same with other draws, which follow from the seed."""
        generator = torch.Generator().manual_seed(self.seed)
        for seed in torch.randint(2**62, (count,), generator=generator).tolist():
            yield replace(self, seed=seed)

    @cached_property
    def _size(self) -> int:
        """How many rows at a time: whole blocks of samples, and no more covariances than fit."""
        row_bytes = self.classes * self.samples * self.like.element_size()
        block = max(1, BLOCK_BYTES.get(self.like.device.type, 2**21) // row_bytes)
        most = max(1, min(_AT_A_TIME, _COVARIANCE_NUMBERS // self.classes**2))
        return block * max(1, most // block)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[GaussianSampler, tuple[int, int]]]:
        size = self._size
        while start < stop:
            first = start - start % size
            end = min(first + size, self.rows)
            yield self._sampler(first, end), (start - first, min(stop, end) - first)
            start = end

    def _sampler(self, first: int, end: int) -> GaussianSampler:
        found = self._last.get(first)
        if found is None:
            gaussian = self.gaussians_of(first, end)
            root, jitter = gaussian.form.sampling_root(gaussian.mean.dtype)
            found = GaussianSampler.of(gaussian.mean, root, self.samples, self.seed, self.draws, self.kind)
            self._jitter[0] = max(self._jitter[0], jitter)
            if sum(sampler.root.values.nbytes for sampler in self._last.values()) > _KEPT_BYTES:
                self._last.clear()
            self._last[first] = found
        return found


@dataclass(frozen=True, eq=False)
class PositionsPrediction(Prediction):
    """The PMF of every position, (B, *S, M), and all statistics of its samples, which lead with (B, *S) too.

    `flat` has the positions one after the other, as inputs of their own.
    """

    flat: Prediction = field(kw_only=True)
    leading: tuple[int, ...] = field(kw_only=True)
    # The label of positions without one, as in the fit: `errbar.metrics` leaves them out.
    ignore_index: int = field(kw_only=True, default=IGNORE_INDEX)

    @staticmethod
    def of(flat: Prediction, leading: tuple[int, ...], ignore_index: int) -> PositionsPrediction:
        pmf = flat.pmf.reshape(*leading, flat.pmf.shape[1])
        return PositionsPrediction(
            pmf, flat.sampler, flat.jitter, flat=flat, leading=leading, ignore_index=ignore_index
        )

    def __len__(self) -> int:
        return self.leading[0]

    def __getitem__(self, rows: Any) -> PositionsPrediction:
        """The prediction of some inputs, with all their positions."""
        inputs = torch.arange(len(self))[self._checked_rows(rows)]
        each = math.prod(self.leading[1:])
        positions = (inputs[:, None] * each + torch.arange(each)).flatten().to(self.pmf.device)
        return PositionsPrediction.of(self.flat[positions], (len(inputs), *self.leading[1:]), self.ignore_index)

    def __repr__(self) -> str:
        return text_of_positions(self)

    def _repr_html_(self) -> str:
        return plain_html(text_of_positions(self))

    def to_pandas(self, level: float = 0.95) -> Any:
        raise ArgumentError(
            "A table has a row for each input, and here every position has a PMF; expected "
            "prediction.flat.to_pandas(), which has a row for each position."
        )

    def _shaped(self, values: Tensor) -> Tensor:
        return values.reshape(*self.leading, *values.shape[1:])

    @cached_property
    def covariance(self) -> Float[Tensor, "B *S M M"]:
        """P^f of every position at once, computed when it is read: M² numbers each."""
        return self._shaped(self.flat.covariance)

    @cached_property
    def std(self) -> Float[Tensor, "B *S M"]:
        return self._shaped(self.flat.std)

    def std_of(self, weights: Float[Tensor, "A M"]) -> Float[Tensor, "B *S A"]:
        return self._shaped(self.flat.std_of(weights))

    @cached_property
    def label(self) -> Int[Tensor, "B *S"]:
        return self._shaped(self.flat.label)

    @cached_property
    def confidence(self) -> Float[Tensor, "B *S"]:
        return self._shaped(self.flat.confidence)

    @cached_property
    def standard_error(self) -> Float[Tensor, "B *S M"]:
        return self._shaped(self.flat.standard_error)

    @cached_property
    def entropy(self) -> Float[Tensor, "B *S"]:
        return self._shaped(self.flat.entropy)

    @cached_property
    def mutual_information(self) -> Float[Tensor, "B *S"]:
        return self._shaped(self.flat.mutual_information)

    def risk(self, threshold: float | Float[Tensor, "M"]) -> Float[Tensor, "B *S M"]:
        return self._shaped(self.flat.risk(threshold))

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "B *S M"], Float[Tensor, "B *S M"]]:
        lower, upper = self.flat.interval(level)
        return self._shaped(lower), self._shaped(upper)

    def samples(self) -> Float[Tensor, "B *S K M"]:
        return self._shaped(self.flat.samples())


@dataclass(frozen=True, eq=False)
class PositionLogits:
    """N(ĝ, P^g) of every position; `leading` is (B, *S). Covariances are made when they are read."""

    gaussians_of: GaussiansOf = field(repr=False)
    leading: tuple[int, ...]
    classes: int
    like: Tensor = field(repr=False)
    ignore_index: int = field(repr=False, default=IGNORE_INDEX)

    def __len__(self) -> int:
        return self.leading[0]

    @property
    def n_positions(self) -> int:
        return math.prod(self.leading)

    def rows(self) -> LogitGaussian:
        """The positions one after the other, as inputs of their own; all covariances at once."""
        return LogitGaussian.concatenated(list(self._parts()))

    @cached_property
    def mean(self) -> Float[Tensor, "B *S M"]:
        return self._joined(lambda gaussian: gaussian.mean)

    @cached_property
    def variance(self) -> Float[Tensor, "B *S M"]:
        """The diagonal of P^g."""
        return self._joined(lambda gaussian: gaussian.variance)

    @cached_property
    def contrast_variance(self) -> Float[Tensor, "B *S"]:
        """The mean variance of the M−1 contrasts."""
        return self._joined(lambda gaussian: gaussian.contrast_variance)

    @property
    def covariance(self) -> Float[Tensor, "B *S M M"]:
        """P^g of all positions at once: M² numbers each."""
        return self._joined(lambda gaussian: gaussian.covariance)

    def predict(self, samples: int = 1000, seed: int = 0, *, draws: str = "random") -> PositionsPrediction:
        """Monte Carlo in the M−1 contrasts of each position (eq:gmarg), with the same draws for all of them."""
        sampler = PositionSampler(
            self.gaussians_of,
            self.n_positions,
            self.classes,
            require_samples(samples),
            require_seed(seed),
            draws,
            self.like,
        )
        pmf = mean_over_draws(sampler)
        return PositionsPrediction.of(Prediction(pmf, sampler, sampler.jitter), self.leading, self.ignore_index)

    def _parts(self) -> Iterator[LogitGaussian]:
        size = max(1, min(_AT_A_TIME, _COVARIANCE_NUMBERS // self.classes**2))
        for start in range(0, self.n_positions, size):
            yield self.gaussians_of(start, min(start + size, self.n_positions))

    def _joined(self, statistic: Callable[[LogitGaussian], Tensor]) -> Tensor:
        values = torch.cat([statistic(gaussian) for gaussian in self._parts()])
        return values.reshape(*self.leading, *values.shape[1:])
