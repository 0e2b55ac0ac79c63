"""The structures of the information behind one interface: which sums to make of a batch, and how to predict with them.

| structure | exact | information between | memory |
|---|---|---|---|
| dense | yes | all parameters | n² |
| block | within a layer | parameters of one layer | Σ n_l² |
| kron | no | inputs, and outputs, of one layer | Σ p_l² + d_l² |
| lowrank | up to a stated bound | all parameters, in k directions | k n |
| diag | no | nothing | n |

What each takes in bytes is in `_planning.costs`. A last layer alone with the `eta` Fisher is exact with one matrix a class
(`_curvature.per_class`), and `dense` takes that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.checks import Checks
from errbar._base.memory import available_bytes, readable
from errbar._curvature.block import BlockAccumulator, BlockFactor, BlockSum
from errbar._curvature.dense import DenseAccumulator, DenseFactor, DenseSum, weighted_rows
from errbar._curvature.diagonal import DiagonalAccumulator, DiagonalFactor, DiagonalSum
from errbar._curvature.eigenbasis import KroneckerFactor
from errbar._curvature.fisher import Fisher
from errbar._curvature.kronecker import KroneckerAccumulator, KroneckerSum
from errbar._curvature.lowrank import LowRankAccumulator, LowRankFactor, LowRankSum, pulled_back
from errbar._curvature.per_class import PerClassAccumulator, PerClassFactor, PerClassSum
from errbar._curvature.workload import Structure
from errbar._derivative.layerwise import LayerwiseDerivative, LayerwiseRoute
from errbar._derivative.route import Derivative, Route, differentiate
from errbar._derivative.trace import UnlikeFirstBatchError
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._model.batch import Batch
from errbar._model.network import Network, require_finite_logits
from errbar._model.selection import Layer, Selection, listed_modules
from errbar._planning.choice import PREFERENCE, Request
from errbar.errors import StructureNotice

STRUCTURES = PREFERENCE
DEFAULT_RANK = 100
# Structures that can do without J make a root of the covariance between frames of up to so many numbers.
ROOT_NUMBERS = 2**26

Sum = DenseSum | PerClassSum | BlockSum | KroneckerSum | LowRankSum | DiagonalSum
Factor = DenseFactor | PerClassFactor | BlockFactor | KroneckerFactor | LowRankFactor | DiagonalFactor
Rows = list[Float[Tensor, "k n"]]


class Accumulator(Protocol):
    """Adds up prepared batches and returns their logits; private to one pass over the data."""

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]: ...

    def finish(self) -> Any: ...


class Way(Protocol):
    """How a structure differentiates: for sums, for P^g of each input, and for the covariance between inputs."""

    def accumulator(self, keep: Rows | None) -> Accumulator: ...

    def gaussians(self, factor: Any, batch: Batch) -> Iterator[LogitGaussian]: ...

    def joint(self, factor: Any, batch: Batch) -> JointLogits: ...

    def on(self, network: Network) -> Way: ...


@dataclass(frozen=True, eq=False)
class ByDerivative:
    """Sums of ∂g/∂θ in factored form, and dense and block ones of Jacobians."""

    structure: Structure
    network: Network
    selection: Selection
    route: Route
    fisher: Fisher
    n_classes: int
    dtype: torch.dtype
    request: Request | None = None

    @property
    def is_per_class(self) -> bool:
        """A last layer alone, which returns the logits themselves, with the `eta` Fisher: see `_curvature.per_class`."""
        return self.structure == "dense" and self.fisher == "eta" and self.route.identity

    def on(self, network: Network) -> ByDerivative:
        return replace(self, network=network)

    def accumulator(self, keep: Rows | None) -> Accumulator:
        """An empty sum; refused with the bytes that it would need where those are not there."""
        _require_memory(self.request, self.structure, self.network.device)
        return _Differentiating(self, self._sums(), keep)

    def _sums(self) -> DenseAccumulator | PerClassAccumulator | BlockAccumulator | DiagonalAccumulator:
        device, n = self.network.device, self.selection.n_parameters
        if self.is_per_class:
            return PerClassAccumulator(self.route.layers[0], self.dtype, device)
        if self.structure == "block":
            return BlockAccumulator(self.selection, self.fisher, self.dtype, device)
        if self.structure == "diag":
            return DiagonalAccumulator(n, self.fisher, self.dtype, device)
        return DenseAccumulator(n, self.fisher, self.dtype, device)

    def derivatives(self, batch: Batch) -> Iterator[tuple[Float[Tensor, "b M"], Derivative]]:
        """The logits and their derivative in the network's own dtype, for some samples at a time."""
        for part in self.route.chunks(batch, self.network.device):
            yield differentiate(self.network, self.selection, self.route, part)

    def gaussians(self, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        for mean, derivative in self.derivatives(batch):
            made = factor.gaussian(mean.to(self.network.dtype), derivative.to(self.dtype))
            # It would otherwise stay until the next one is there.
            del derivative
            yield made

    def joint(self, factor: Any, batch: Batch) -> JointLogits:
        parts = list(self.derivatives(batch))
        mean = torch.cat([mean for mean, _ in parts])
        derivative = Derivative.concatenated([part.to(torch.float64) for _, part in parts])
        return _joint(factor, mean, derivative, self.network)


def _require_memory(request: Request | None, structure: Structure, device: torch.device) -> None:
    """Refuse what would not fit; a way that came from a file has sums of that size in memory already."""
    if request is not None:
        request.require(structure, device)


class _Differentiating:
    def __init__(self, way: ByDerivative | ByLayer, sums: Any, keep: Rows | None) -> None:
        self.way, self.sums, self.keep = way, sums, keep

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]:
        logits = []
        for part, derivative in self.way.derivatives(batch):
            self.sums.add(part, derivative)
            logits.append(part)
            if self.keep is not None:
                self.keep.append(weighted_rows(part, derivative.jacobian(), self.way.fisher, self.way.dtype))
            # It would otherwise stay until the next one is there.
            del derivative
        return torch.cat(logits)

    def finish(self) -> Any:
        return self.sums.finish()


@dataclass(frozen=True, eq=False)
class ByLayer:
    """Kronecker and diagonal sums: the inputs of each layer and the derivatives by its outputs."""

    structure: Structure
    network: Network
    selection: Selection
    route: LayerwiseRoute
    fisher: Fisher
    dtype: torch.dtype
    request: Request | None = None

    def on(self, network: Network) -> ByLayer:
        return replace(self, network=network)

    def accumulator(self, keep: Rows | None) -> Accumulator:
        device = self.network.device
        _require_memory(self.request, self.structure, device)
        if self.structure == "kron":
            return KroneckerAccumulator(self.network, self.route, self.fisher, self.dtype, device)
        sums = DiagonalAccumulator(self.route.n_parameters, self.fisher, self.dtype, device)
        return _Differentiating(self, sums, keep)

    def derivatives(self, batch: Batch) -> Iterator[tuple[Float[Tensor, "b M"], LayerwiseDerivative]]:
        """The logits and their derivative in the network's own dtype, for some samples at a time."""
        device = self.network.device
        for part in self.route.chunks(batch, device):
            try:
                made = self.route.differentiate(self.network, part)
            except UnlikeFirstBatchError:
                if self.structure == "kron":
                    raise
                alone = LayerwiseRoute.of(self.selection, self.route.n_classes, ())
                for few in alone.chunks(part, device):
                    yield alone.differentiate(self.network, few)
                continue
            yield made
            del made

    def gaussians(self, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        for mean, derivative in self.derivatives(batch):
            made = factor.gaussian(mean.to(self.network.dtype), derivative.to(self.dtype))
            # It would otherwise stay until the next one is there.
            del derivative
            yield made

    def joint(self, factor: Any, batch: Batch) -> JointLogits:
        means, parts = zip(*self.derivatives(batch), strict=True)
        derivative = LayerwiseDerivative.concatenated(parts).to(torch.float64)
        return _joint(factor, torch.cat(means), derivative, self.network)


@dataclass(frozen=True, eq=False)
class ByRows:
    """A sketch of rows RᵀJ by vector-Jacobian products, for whole networks."""

    network: Network
    selection: Selection
    fisher: Fisher
    dtype: torch.dtype
    rank: int
    request: Request | None = None

    def on(self, network: Network) -> ByRows:
        return replace(self, network=network)

    def accumulator(self, keep: Rows | None) -> Accumulator:
        device = self.network.device
        _require_memory(self.request, "lowrank", device)
        return LowRankAccumulator(self.network, self.selection, self.fisher, self.dtype, device, self.rank)

    def gaussians(self, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        yield factor.gaussian_of_batch(self.network, self.selection, batch)

    def joint(self, factor: Any, batch: Batch) -> JointLogits:
        mean = self.network.logits(batch)
        classes = mean.shape[1]
        identity = torch.eye(classes, dtype=mean.dtype, device=mean.device).expand(len(mean), classes, classes)
        jacobian = pulled_back(self.network, self.selection, batch, identity)
        derivative = Derivative(self.selection.n_parameters, classes, None, jacobian.double())
        return _joint(factor, mean, derivative, self.network)


def _joint(
    factor: Any, mean: Float[Tensor, "C M"], derivative: Derivative | LayerwiseDerivative, network: Network
) -> JointLogits:
    """The logits of several frames together: whatever the dtype of the network, everything after it is float64.

    By a root of R, in contrasts, as long as that can be held or J is made anyway.
    """
    rounding = torch.finfo(mean.dtype).eps
    mean = mean.to(network.dtype)
    if mean.numel() * derivative.n_parameters > ROOT_NUMBERS and hasattr(factor, "joint_covariance"):
        return JointLogits.trusted(mean, factor.joint_covariance(derivative), network_rounding=rounding)
    rotation = linalg.class_rotation(mean.shape[1], mean.device)
    return JointLogits.from_root(mean, linalg.root_of_sum(factor.joint_halves(derivative, rotation)), rounding)


def way(
    structure: Structure,
    network: Network,
    selection: Selection,
    batch: Batch,
    layers: tuple[Layer, ...],
    *,
    fisher: Fisher,
    n_classes: int,
    dtype: torch.dtype,
    rank: int,
    size: int | None = None,
) -> Way:
    """How to go about a structure, by what the layers are and by what the first (prepared) batch shows.

    `layers` are those of the network, in order, for advice on how many would fit; `size` is how many samples batches
    will have, where that is not the size of this one.
    """
    request = Request.of(network, selection, batch, layers, fisher=fisher, dtype=dtype, rank=rank, size=size)
    if structure == "kron":
        by_layer = LayerwiseRoute.plan(network, selection, batch)
        _say_what_is_diagonal(by_layer.rest.matrices(), selection.n_parameters)
        return ByLayer(structure, network, selection, by_layer, fisher, dtype, request)
    if structure == "lowrank":
        return ByRows(network, selection, fisher, dtype, rank, request)
    route = Route.plan(network, selection, batch)
    if structure == "diag" and route.by_layer is not None:
        return ByLayer(structure, network, selection, route.by_layer, fisher, dtype, request)
    return ByDerivative(structure, network, selection, route, fisher, n_classes, dtype, request)


def _say_what_is_diagonal(alone: dict[str, int], n: int) -> None:
    """A notice of the layers, with their parameters, that `kron` cannot take apart: it takes them as `diag` does.

    Of norm layers, and other vectors, nothing is said: there is nothing in them to take apart.
    """
    if alone:
        warnings.warn(
            f"structure='kron' takes {listed_modules(tuple(alone))} as 'diag' does, {sum(alone.values()):,} of {n:,} "
            "parameters: it expected linear layers, and convolutions in one group, whose weights nothing else uses. "
            "Leave them out (parameters=[...]), or use structure='block' or 'lowrank' for the covariances within them.",
            StructureNotice,
            stacklevel=3,
        )


def structure_that_fits(
    network: Network,
    selection: Selection,
    batch: Batch,
    layers: tuple[Layer, ...],
    *,
    fisher: Fisher,
    dtype: torch.dtype,
    rank: int,
    size: int | None = None,
) -> Structure:
    """What `structure="auto"` takes: the first of `STRUCTURES` that fits into memory; said aloud if it is not exact."""
    request = Request.of(network, selection, batch, layers, fisher=fisher, dtype=dtype, rank=rank, size=size)
    chosen, found = request.best(network.device)
    if not found.exact:
        exact = request.cost("dense").peak_bytes
        warnings.warn(
            f"structure='auto' took '{chosen}', which is not exact: the exact covariance of {selection.n_parameters:,} "
            f"parameters would take {readable(exact)}, and {readable(available_bytes(network.device))} are available. "
            "Select fewer layers for the exact one, or name the structure to silence this.",
            StructureNotice,
            stacklevel=3,
        )
    return chosen


def rounding_share(factor: Factor, prior_precision: Float[Tensor, "n"]) -> float:
    """By how much rounding of float32 products has changed variances that the prior decides: a share of them.

    From the error of the sums where that was computed beside them, else from how far an eigenvalue of the information
    is below zero, where rounding alone can take it. `diag` has no directions in which sums of squares cancel, and of
    what a sketch leaves out the rounding is not known.
    """
    if isinstance(factor, DenseFactor):
        if factor.total.error is None:
            return linalg.negative_share(factor.lower, prior_precision)
        return linalg.error_share(factor.lower, prior_precision, factor.total.error)
    if isinstance(factor, BlockFactor):
        parts = zip(factor.blocks, factor.factors, strict=True)
        return max(rounding_share(part, block.part.take(prior_precision)) for block, part in parts)
    if isinstance(factor, PerClassFactor):
        return linalg.negative_share(factor.lower, prior_precision[factor.layer.positions().to(factor.lower.device)])
    return factor.negative_share if isinstance(factor, KroneckerFactor) else 0.0


def is_zero(total: Sum) -> bool:
    """Whether a sum says nothing at all about any parameter."""
    if isinstance(total, KroneckerSum):
        return not (total.rest.values.any() or any(block.outer.any() for block in total.blocks))
    if isinstance(total, BlockSum):
        return all(is_zero(part) for part in total.totals)
    if isinstance(total, PerClassSum):
        return not total.totals.any()
    if isinstance(total, DenseSum):
        return not total.matrix.diagonal().any()
    return not (total.diagonal if isinstance(total, LowRankSum) else total.values).any()


def checked(gaussians: Iterator[LogitGaussian], checks: Checks) -> Iterator[LogitGaussian]:
    for gaussian in gaussians:
        require_finite_logits(gaussian.mean, checks)
        yield gaussian
