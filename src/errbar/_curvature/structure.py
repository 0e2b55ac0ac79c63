"""The interface of a structure of the information: how it adds up data, predicts, costs, and is saved.

    Structure      one for each name: it begins sums, predicts with factors, reads files and knows its cost
    Accumulator    adds up the batches of one pass over the data
    Sum            what they add up to: information, which adds up over days, sites and ranks
    Factor         a sum and a prior: the posterior, ready to predict

A new structure is one file with these four and one line in `_curvature.registry`. `Structure` has default methods for
the derivatives; a structure overrides those that do not suit it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._curvature.fisher import Weights, weighted
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload, draws_are_quicker, pushed
from errbar._derivative.layers import LinearLayer
from errbar._derivative.route import Route
from errbar._derivative.trace import Seeds, TopClasses
from errbar._distributed.team import Team
from errbar._distributions.covariance import JointCovariance
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ExportError

# The size of J up to which the covariance between frames is computed from a root.
ROOT_NUMBERS = 2**26

Description = dict[str, Any]
Tensors = dict[str, Tensor]
Rows = list[Float[Tensor, "k n"]]


class Sum(Protocol):
    """The information of data about the parameters, in float64; additive."""

    @property
    def device(self) -> torch.device: ...

    def dense(self) -> Float[Tensor, "n n"]:
        """The information matrix, in full."""
        ...

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __mul__(self, factor: float, /) -> Self: ...

    def to(self, device: torch.device, /) -> Self: ...

    def tolerance(self, dtype: torch.dtype, /) -> Any:
        """How far below zero rounding may take an eigenvalue of a difference from this sum, computed in `dtype`.

        A number; for a sum of several parts, one for each.
        """
        ...

    def is_positive_semidefinite(self, tolerance: Any, /) -> bool:
        """Whether no eigenvalue is below −tolerance."""
        ...

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float, /) -> Factor:
        """The posterior with this prior; `limit` is the largest jitter that rounding explains."""
        ...

    def is_zero(self) -> bool:
        """Whether it holds no information about any parameter."""
        ...

    def reduced(self, has_data: Sequence[bool], team: Team, /) -> Self:
        """Σ over the ranks of the sums of each; `has_data` says which of them have any. A collective call."""
        ...

    def written(self) -> tuple[Description, Tensors]:
        """A description, with the `form` of the sum, and arrays: what `Structure.read_sum` reads."""
        ...


class Factor(Protocol):
    """P = (information + prior precision)⁻¹, factorised."""

    @property
    def jitter(self) -> float:
        """What had to be added to the precision, as a share of its mean diagonal, to factorise it."""
        ...

    @property
    def covariance(self) -> Float[Tensor, "n n"]: ...

    def can_recurse(self, rows: int, /) -> bool:
        """Whether `rows` more rows by `recursion` are cheaper than a factorisation."""
        ...

    def recursion(self, rows: Float[Tensor, "k n"], total: Any, /) -> Factor:
        """The posterior after the rows UᵀJ of more data, which make `total` (eq:recUpdate_all)."""
        ...

    def sample(self, normal: Float[Tensor, "K n"], /) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P), in the dtype of `normal`, which may be overwritten, or a wider one."""
        ...

    def log_determinant_of_precision(self) -> float: ...

    def rounding_share(self, prior_precision: Float[Tensor, "n"], /) -> float:
        """The share by which rounding of float32 products has changed variances that the prior decides.

        Zero where it is unknown: `diag` has no directions in which sums of squares cancel, and the rounding of what a
        sketch leaves out cannot be measured.
        """
        ...

    def to(self, device: torch.device, /) -> Factor: ...

    def written(self) -> tuple[Description, Tensors]:
        """A description, and arrays in their memory layout: what `Structure.read_factor` reads."""
        ...

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype, /) -> GraphCovariance:
        """What an exported graph needs to make P^g of the terms of `layers`; `ExportError` if it cannot."""
        ...


class Refactorised:
    """A factor without a recursion, recomputed from its sum; without a graph unless overridden."""

    def can_recurse(self, rows: int) -> bool:
        return False

    def recursion(self, rows: Float[Tensor, "k n"], total: Any) -> Factor:
        raise AssertionError("unreachable: can_recurse says no")

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        return 0.0

    def in_graph(self, layers: Sequence[LinearLayer], dtype: torch.dtype) -> GraphCovariance:
        raise ExportError(
            "A posterior of this structure cannot be exported: its prediction differentiates the whole network. "
            "Expected 'dense', 'block', 'kron' or 'diag'."
        )


@dataclass(frozen=True, eq=False)
class PairCoefficients:
    """P as packed coefficients of h_a h'_b, for each pair of layers (x ≤ y)."""

    pairs: Mapping[tuple[int, int], Float[Tensor, "rows k"]]


@dataclass(frozen=True, eq=False)
class IndependentVariances:
    """Variances of the parameters of each layer, as they are or in `bases` (outer, inner)."""

    variances: Sequence[Float[Tensor, "d p"]]
    bases: Sequence[tuple[Float[Tensor, "d d"], Float[Tensor, "p p"]]] | None


@dataclass(frozen=True, eq=False)
class ClassCoefficients:
    """Packed coefficients of h_a h_b for each class of a last layer alone."""

    coefficients: Float[Tensor, "rows M"]


GraphCovariance = PairCoefficients | IndependentVariances | ClassCoefficients


class Accumulator(Protocol):
    """Adds up prepared batches and returns their logits; private to one pass over the data."""

    def add_batch(self, batch: Batch, /) -> Float[Tensor, "B M"]: ...

    def finish(self) -> Sum: ...


class Summand(Protocol):
    """What `Differentiating` adds derivatives to."""

    def add(self, weights: Weights, derivative: Any, /) -> None:
        """Add Σ_n J_nᵀ Λ_n J_n of some samples."""
        ...

    def finish(self) -> Sum: ...


class Structure(ABC):
    """One structure of the information: see the top of this file.

    By default derivatives come from `_derivative.route`: as terms V ⊗ hᵀ where the layers allow it, otherwise as
    Jacobians. `sums` says what adds them up, and the factor's `gaussian` and `joint_covariance` predict with them.
    """

    name: ClassVar[str]
    # Whether it can be the structure of some parameters, with another for the others (`_curvature.mixed`).
    can_be_part: ClassVar[bool] = True

    def routed(self, task: Task, batch: Batch, rank: int) -> Task:
        """The task with what the first (prepared) batch decides; `rank` is that of a sketch."""
        return replace(task, rank=self.rank(rank), route=self.route(task.network, task.selection, batch))

    def divided(self, task: Task) -> tuple[Task, ...]:
        """The tasks of the parts of a mixed structure, without their routes; none for any other."""
        return ()

    def route(self, network: Network, selection: Selection, batch: Batch) -> Route | None:
        """How to differentiate, from the layers and the first (prepared) batch."""
        return Route.plan(network, selection, batch)

    def rank(self, rank: int) -> int:
        """The rank of a sketch, checked; 1 for a structure without one."""
        return 1

    @abstractmethod
    def cost(self, work: Workload) -> Cost:
        """The cost of a fit and of predictions."""

    def sums(self, task: Task) -> Summand:
        """An empty sum."""
        raise AssertionError("a structure has either sums or an accumulator of its own")

    def accumulator(self, task: Task, rows: Rows | None) -> Accumulator:
        """What adds up batches; with `rows`, the rows U_nᵀ of all samples are appended there."""
        return Differentiating(self, task, self.sums(task), rows)

    def derivatives(
        self, task: Task, batch: Batch, seeds: Seeds | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], Any]]:
        """The logits and their derivative in the network's own dtype, for some samples at a time.

        With `seeds`, the derivative of as many combinations of the logits as there are seeds.
        """
        assert task.route is not None
        return task.route.derivatives(task.network, task.selection, batch, seeds)

    def gaussians(self, task: Task, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        """N(ĝ, P^g) of the inputs of a prepared batch, for some of them at a time."""
        for mean, derivative in self.derivatives(task, batch):
            gaussian = factor.gaussian(mean.to(task.network.dtype), derivative.to(task.dtype))
            # Otherwise it would stay until the next one exists.
            del derivative
            yield gaussian

    def gaussians_of_each(
        self, task: Task, factors: Sequence[Any], batch: Batch
    ) -> Iterator[tuple[LogitGaussian, ...]]:
        """`gaussians` of several factors at once, of one sum with several priors: the derivatives are the same."""
        for mean, derivative in self.derivatives(task, batch):
            in_products = derivative.to(task.dtype)
            del derivative
            yield tuple(factor.gaussian(mean.to(task.network.dtype), in_products) for factor in factors)

    def top_gaussians(self, task: Task, factor: Any, batch: Batch, top: int) -> Iterator[LogitGaussian]:
        """N(ĝ, P^g) of the `top` classes of each input with the largest means, by as many backward passes."""
        seeds = TopClasses(top)
        for mean, derivative in self.derivatives(task, batch, seeds):
            classes = seeds.classes(mean)
            own = mean.to(task.network.dtype).gather(1, classes)
            gaussian = factor.gaussian(own, derivative.to(task.dtype))
            yield LogitGaussian(own, gaussian.form, classes=classes)

    def joint(self, task: Task, factor: Any, batch: Batch) -> JointLogits:
        """The logits of a prepared batch of frames, and the covariance between all of them."""
        return joint_logits(factor, *self.whole_derivative(task, batch), task.network)

    def whole_derivative(self, task: Task, batch: Batch) -> tuple[Float[Tensor, "C M"], Any]:
        """The logits of all frames of a prepared batch, and their derivative in float64."""
        parts = list(self.derivatives(task, batch))
        derivatives = [derivative.to(torch.float64) for _, derivative in parts]
        mean = torch.cat([mean for mean, _ in parts])
        return mean, type(derivatives[0]).concatenated(derivatives)

    @abstractmethod
    def read_sum(self, contents: Contents, task: Task) -> Sum:
        """The sum in a file, on the CPU, checked against the task that the file says it is about."""

    @abstractmethod
    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        """The factor in a file, on the CPU, of a sum and a prior precision that were read from it."""


class Differentiating:
    """Differentiates batches, and adds the derivatives up."""

    def __init__(self, structure: Structure, task: Task, sums: Summand, rows: Rows | None) -> None:
        self.structure, self.task, self.sums, self.rows = structure, task, sums, rows

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]:
        logits: list[Tensor] = []
        start = 0
        for part, derivative in self.structure.derivatives(self.task, batch, self.task.scores):
            labels, own = (
                None if part_of is None else part_of[start : start + len(part)]
                for part_of in (batch.labels, batch.weights)
            )
            weights = weighted(self.task.weights(part, labels), own)
            start += len(part)
            self.sums.add(weights, derivative)
            logits.append(part)
            if self.rows is not None:
                self.rows.append(weights.rooted(derivative.jacobian().to(self.task.dtype)).flatten(0, 1))
            # Otherwise it would stay until the next one exists.
            del derivative
        return torch.cat(logits)

    def finish(self) -> Sum:
        return self.sums.finish()


def planned_cost(structure: Structure, work: Workload) -> Cost:
    """What a fit and predictions take; where labels are drawn, a fit takes these in place of all classes."""
    cost = structure.cost(work)
    if cost.seeds[1] and draws_are_quicker(work.classes, work.draws):
        cost = pushed(cost, work)
    if not work.scores:
        return cost
    drawn = structure.cost(replace(work, classes=work.scores, scores=0))
    return replace(
        cost,
        fit_bytes=max(drawn.fit_bytes, cost.posterior_bytes),
        sample_products=drawn.sample_products,
        seeds=(drawn.seeds[0], cost.seeds[1]),
    )


def joint_logits(factor: Any, mean: Float[Tensor, "C M"], derivative: Any, network: Network) -> JointLogits:
    """The logits of several frames together: whatever the dtype of the network, everything after it is float64.

    From a root of R, in contrasts, if that is small enough or the factor has no other way.
    """
    rounding = torch.finfo(mean.dtype).eps
    mean = mean.to(network.dtype)
    if mean.numel() * derivative.n_parameters > ROOT_NUMBERS and hasattr(factor, "joint_covariance"):
        return JointLogits(mean, JointCovariance(factor.joint_covariance(derivative), network_rounding=rounding))
    rotation = linalg.class_rotation(mean.shape[1], mean.device)
    root = linalg.root_of_sum(factor.joint_halves(derivative, rotation)).reshape(*mean.shape, -1)
    return JointLogits(mean, JointCovariance.from_root(root, rounding))
