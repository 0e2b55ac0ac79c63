"""The Kronecker-factored structure: each layer by the second moments of its inputs and of its derivatives.

For a layer that is used T times by each of N samples, with inputs h_nt and derivatives V_nt = ∂g_n/∂a_nt,
    A = Σ_n Σ_t h hᵀ (p × p),   G = Σ_n Σ_t VᵀΛV (d × d),   count = N T,   information ≈ (G ⊗ A)/count
(KFAC, with shared weights in the *expand* convention: every use counts as a sample). Nothing is approximated for one
sample that uses the weight once, nor where all h hᵀ, or all VᵀΛV, are the same. A, G and count are *sums*, so they add
up exactly over batches, ranks and days, and c times all three is c times the information.

With A = Q_A diag(μ) Q_Aᵀ, G = Q_G diag(λ) Q_Gᵀ and one prior precision δ for the layer, the covariance is diagonal in
the bases Q_G and Q_A, with variances 1/(λ_i μ_a/count + δ). Parameters of other layers (norms) are independent of all.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._base.triangles import read_symmetric, symmetric_array
from errbar._curvature.diagonal import DiagonalSum, safe_precision
from errbar._curvature.eigenbasis import KroneckerBasis, KroneckerFactor, empty_matrix, set_block_
from errbar._curvature.fisher import weighted, weighted_root
from errbar._curvature.structure import Accumulator, Description, Factor, Rows, Structure, Sum, Tensors
from errbar._curvature.task import Task
from errbar._curvature.workload import (
    ADDED_PRODUCTS,
    Cost,
    Workload,
    backward_bytes,
    backward_passes,
    by_layer_bytes,
    drawing_bytes,
    drawing_products,
    kept_bytes,
    piece_bytes,
    samples_at_a_time,
)
from errbar._derivative import layerwise
from errbar._derivative.layers import SharedLayer, Spans, gathered
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.route import Route
from errbar._derivative.trace import Seeds, Trace
from errbar._distributed.reduce import triangle_summed
from errbar._distributed.team import Team
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection, listed_modules
from errbar.errors import ArgumentError, DamagedFileError, MismatchError, StructureNotice

# eigh takes the matrix, its eigenvectors and 2 n² numbers of workspace; MKL one matrix more. In multiplications,
# measured against a product of the same size.
_EIGEN_MATRICES = 5
_EIGEN_PRODUCTS = 6


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """A, G and the count of one layer, in float64.

    `peak` holds the largest diagonal entries of A and G and the largest count on the way here: rounding is relative to
    these, even after a subtraction.
    """

    layer: SharedLayer
    inner: Float[Tensor, "p p"]
    outer: Float[Tensor, "d d"]
    count: float
    peak: tuple[float, float, float]

    @staticmethod
    def of(
        layer: SharedLayer,
        inner: Float[Tensor, "p p"],
        outer: Float[Tensor, "d d"],
        count: float,
        before: Sequence[tuple[float, float, float]] = (),
    ) -> KroneckerBlock:
        """From the sums, and the peaks of their parts."""
        peak = (float(inner.diagonal().max()), float(outer.diagonal().max()), count)
        a, g, c = (max(values) for values in zip(peak, *before, strict=True))
        return KroneckerBlock(layer, inner, outer, count, (a, g, c))

    def plus(self, other: KroneckerBlock, sign: int) -> KroneckerBlock:
        if self.layer != other.layer:
            raise MismatchError(
                f"Kronecker factors of layers '{self.layer.name}' and '{other.layer.name}' cannot be combined; the "
                "first batches of the two showed different layers."
            )
        inner, outer = self.inner + sign * other.inner, self.outer + sign * other.outer
        # Discounts round, so a count of zero may come out slightly negative.
        count = max(self.count + sign * other.count, 0)
        return KroneckerBlock.of(self.layer, inner, outer, count, (self.peak, other.peak))

    def times(self, factor: float) -> KroneckerBlock:
        a, g, c = (factor * value for value in self.peak)
        return KroneckerBlock(self.layer, self.inner * factor, self.outer * factor, self.count * factor, (a, g, c))

    @property
    def share(self) -> float:
        """1/count, and 0 where all samples were forgotten."""
        return 1 / self.count if self.count > 1e-9 * self.peak[2] else 0.0

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        return all(
            linalg.is_positive_semidefinite(matrix, tolerance=tolerance * len(matrix) * peak)
            for matrix, peak in ((self.inner, self.peak[0]), (self.outer, self.peak[1]))
        )

    def to(self, device: torch.device) -> KroneckerBlock:
        return KroneckerBlock(self.layer, self.inner.to(device), self.outer.to(device), self.count, self.peak)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> tuple[KroneckerBasis, float, float]:
        """The eigenbasis of the precision, the jitter that it needed, and how far below zero rounding was."""
        own = gathered(self.layer, prior_precision)
        least, most = float(own.min()), float(own.max())
        if least != most:
            raise ArgumentError(
                f"The prior precision of layer '{self.layer.name}' ranges from {least:g} to {most:g}; structure='kron' "
                "needs one number for a layer, its weight and bias together. Give one number for each module, or use "
                "structure='block' or 'diag'.",
                arguments={"structure": ("kron", "block")},
            )
        name = f"The Kronecker factors of layer '{self.layer.name}'"
        inner_values, inner_basis = linalg.eigenvectors(self.inner, name=name)
        outer_values, outer_basis = linalg.eigenvectors(self.outer, name=name)
        products = outer_values[:, None] * inner_values * self.share
        _, jitter = safe_precision(products + least, limit=limit)
        # Sums of squares have no eigenvalues below zero; those that rounding leaves there are set to zero.
        information = outer_values.clamp_min(0)[:, None] * inner_values.clamp_min(0) * self.share
        basis = KroneckerBasis(self.layer, outer_basis, inner_basis, information + least)
        return basis, jitter, max(0.0, -float(products.min()) / least)


@dataclass(frozen=True, eq=False)
class KroneckerSum:
    """A, G and the counts of all layers, and the diagonal information of all other parameters; additive."""

    n_parameters: int
    blocks: tuple[KroneckerBlock, ...]
    rest_spans: Spans
    rest: DiagonalSum
    rest_peak: float

    @property
    def device(self) -> torch.device:
        return self.rest.device

    def dense(self) -> Float[Tensor, "n n"]:
        whole = empty_matrix(self.n_parameters, self.device)
        for block in self.blocks:
            set_block_(whole, block.layer, torch.kron(block.outer * block.share, block.inner))
        if len(self.rest_spans):
            positions = self.rest_spans.positions(self.device)
            whole[positions, positions] = self.rest.values
        return whole

    def __add__(self, other: KroneckerSum) -> KroneckerSum:
        return self._plus(other, 1)

    def __sub__(self, other: KroneckerSum) -> KroneckerSum:
        return self._plus(other, -1)

    def _plus(self, other: KroneckerSum, sign: int) -> KroneckerSum:
        if len(self.blocks) != len(other.blocks):
            raise MismatchError(
                f"Kronecker factors of {len(self.blocks)} and of {len(other.blocks)} layers cannot be combined; the "
                "first batches of the two showed different layers."
            )
        blocks = tuple(a.plus(b, sign) for a, b in zip(self.blocks, other.blocks, strict=True))
        rest = self.rest + other.rest * float(sign)
        peak = max(self.rest_peak, other.rest_peak, _largest(rest.values))
        return KroneckerSum(self.n_parameters, blocks, self.rest_spans, rest, peak)

    def __mul__(self, factor: float) -> KroneckerSum:
        blocks = tuple(block.times(factor) for block in self.blocks)
        return KroneckerSum(self.n_parameters, blocks, self.rest_spans, self.rest * factor, self.rest_peak * factor)

    def to(self, device: torch.device) -> KroneckerSum:
        blocks = tuple(block.to(device) for block in self.blocks)
        return KroneckerSum(self.n_parameters, blocks, self.rest_spans, self.rest.to(device), self.rest_peak)

    def tolerance(self, dtype: torch.dtype) -> float:
        """The rounding of a sum computed in `dtype`, relative: A, G and the rest each have a scale of their own."""
        return 10 * torch.finfo(dtype).eps

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Whether no eigenvalue of a factor is below −tolerance, relative to the largest entries ever."""
        return self.rest.is_positive_semidefinite(10 * tolerance * self.rest_peak) and all(
            block.is_positive_semidefinite(tolerance) for block in self.blocks
        )

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> KroneckerFactor:
        parts = [block.condition(prior_precision, limit) for block in self.blocks]
        rest, jitter = self.rest.values, 0.0
        if len(self.rest_spans):
            rest, jitter = safe_precision(rest + self.rest_spans.take(prior_precision), limit=limit)
        jitter = max([jitter, *(block_jitter for _, block_jitter, _ in parts)])
        negative_share = max((share for _, _, share in parts), default=0.0)
        bases = tuple(basis for basis, _, _ in parts)
        return KroneckerFactor(self.n_parameters, bases, self.rest_spans, rest, jitter, negative_share)

    def is_zero(self) -> bool:
        return self.rest.is_zero() and not any(bool(block.outer.any()) for block in self.blocks)

    def reduced(self, has_data: Sequence[bool], team: Team) -> KroneckerSum:
        """A, G and the counts are summed over the ranks; (G ⊗ A)/count then follows."""
        counts = team.exchange([block.count for block in self.blocks])
        blocks = tuple(
            KroneckerBlock.of(
                block.layer,
                triangle_summed(block.inner, team),
                triangle_summed(block.outer, team),
                sum(own[index] for own in counts),
            )
            for index, block in enumerate(self.blocks)
        )
        if not len(self.rest_spans):
            return replace(self, blocks=blocks)
        rest = self.rest.reduced(has_data, team)
        return replace(self, blocks=blocks, rest=rest, rest_peak=float(rest.values.abs().max()))

    def written(self) -> tuple[Description, Tensors]:
        arrays: Tensors = {"sum.rest": self.rest.values}
        small = []
        for index, block in enumerate(self.blocks):
            arrays[f"sum.{index}.inner"] = symmetric_array(block.inner)
            arrays[f"sum.{index}.outer"] = symmetric_array(block.outer)
            a, g, c = block.peak
            small.append({"count": block.count, "inner_peak": a, "outer_peak": g, "count_peak": c})
        return {"form": "kron", "blocks": small, "rest_peak": self.rest_peak}, arrays


class KroneckerAccumulator:
    """Adds up batches; private to one pass over the data. It runs the network itself: `add_batch`."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.network = task.network
        self.route = route = _by_layer(task)
        self.dtype = task.dtype
        device = task.network.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        self.inner = {layer.name: zeros(layer.width, layer.width) for layer in route.layers}
        self.outer = {layer.name: zeros(layer.outputs, layer.outputs) for layer in route.layers}
        self.count: dict[str, float] = dict.fromkeys(self.inner, 0)
        self.rest = zeros(len(route.rest_spans))

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]:
        """Add a prepared batch, a part of it at a time; returns its logits."""
        logits = []
        scores = self.task.scores
        for part, trace in self.route.traced(self.network, batch, None if scores is None else scores.count):
            self._add(part, trace)
            logits.append(trace.logits.detach())
            # Otherwise its graph would stay until the next one exists.
            del trace
        return torch.cat(logits)

    def _add(self, batch: Batch, trace: Trace) -> None:
        logits = trace.logits.detach()
        scores = None if self.task.scores is None else self.task.scores(batch, logits)
        samples = batch.weights
        if scores is not None and samples is not None:
            # √w s, so that the sum of their outer products has the weights.
            scores = scores * samples.sqrt()[:, None]
        for layer in self.route.layers:
            for call in trace.calls[layer.name]:
                uses = layer.inner_columns(call.inputs).to(self.dtype)
                each = uses.shape[1] // len(logits)
                if samples is not None:
                    uses = uses * samples.sqrt().to(uses.dtype).repeat_interleave(each)
                self.count[layer.name] += uses.shape[1] if samples is None else each * float(samples.sum())
                linalg.add_lower_square_(self.inner[layer.name], uses)
            if trace.returns_logits(layer.name):
                self._add_logits(self.outer[layer.name], logits, batch.labels, scores, samples)
        names = self.route.differentiated(trace)
        if names:
            self._add_derivatives(names, trace, logits, batch.labels, scores, samples)
        weights = weighted(self.task.weights(logits, batch.labels), samples if scores is None else None)
        for where, jacobian in self.route.of_rest(self.network, batch, scores):
            self.rest[where] += weights.squares(jacobian.to(self.dtype)).sum(0, dtype=torch.float64)

    def _add_logits(
        self,
        total: Float[Tensor, "M M"],
        logits: Float[Tensor, "B M"],
        labels: Int[Tensor, "B *L"] | None,
        scores: Float[Tensor, "k B M"] | None,
        samples: Float[Tensor, "B"] | None,
    ) -> None:
        """Add Σ_n w_n Λ_n; of drawn scores s, which have their weights already, Σ s sᵀ in the lower triangle."""
        if scores is None:
            total += weighted_root(self.task.logit_weights(logits, labels), samples).summed(self.dtype)
        else:
            linalg.add_lower_square_(total, scores.to(self.dtype).flatten(0, 1).mT)

    def _add_derivatives(
        self,
        names: list[str],
        trace: Trace,
        logits: Float[Tensor, "B M"],
        labels: Int[Tensor, "B *L"] | None,
        scores: Float[Tensor, "k B M"] | None,
        samples: Float[Tensor, "B"] | None,
    ) -> None:
        """VᵀΛV = Σ_c u_c u_cᵀ with u_c = Vᵀ r_c, r_c the columns of R: some of these at a time, never all V.

        Of the norms the diagonal of JᵀΛJ, Σ_c (Jᵀ r_c)². Drawn scores are the columns of a root themselves.
        """
        size, count = len(logits), logits.shape[1] if scores is None else len(scores)
        step = self.route.seeds_at_a_time(size, logits.device)
        weights = weighted_root(self.task.logit_weights(logits, labels), samples)
        for first in range(0, count, step):
            last = min(first + step, count)
            columns = weights.columns(first, last) if scores is None else scores[first:last]
            derivatives = trace.derivatives(names, columns.to(logits.dtype))
            for layer in self.route.layers:
                for derivative in derivatives.get(layer.name, ()):
                    linalg.add_lower_square_(self.outer[layer.name], layer.outer_columns(derivative).to(self.dtype))
            for where, rows in self.route.of_columns(derivatives):
                self.rest[where] += rows.to(self.dtype).square().sum((0, 1), dtype=torch.float64)

    def finish(self) -> KroneckerSum:
        blocks = [
            KroneckerBlock.of(
                layer,
                linalg.mirror_(self.inner[layer.name]),
                linalg.mirror_(self.outer[layer.name]),
                self.count[layer.name],
            )
            for layer in self.route.layers
        ]
        rest = DiagonalSum(self.rest)
        return KroneckerSum(self.route.n_parameters, tuple(blocks), self.route.rest_spans, rest, _largest(self.rest))


def _largest(values: Float[Tensor, "k"]) -> float:
    return float(values.abs().max()) if len(values) else 0.0


class KroneckerStructure(Structure):
    """Each layer by the second moments of its inputs and of its derivatives; all else by its variances."""

    name = "kron"

    def route(self, network: Network, selection: Selection, batch: Batch) -> Route | None:
        by_layer = LayerwiseRoute.plan(network, selection, batch)
        _say_what_is_diagonal(_without_factors(by_layer, selection).matrices(), selection.n_parameters)
        return Route((), by_layer=by_layer)

    def cost(self, work: Workload) -> Cost:
        return cost(work)

    def accumulator(self, task: Task, rows: Rows | None) -> Accumulator:
        return KroneckerAccumulator(task)

    def derivatives(
        self, task: Task, batch: Batch, seeds: Seeds | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], Any]]:
        return _by_layer(task).derivatives(task.network, batch, seeds)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        fields = contents.description.part("sum")
        fields.choice("form", ("kron",))
        route, parts = _by_layer(task), fields.parts("blocks")
        if len(parts) != len(route.layers):
            raise DamagedFileError(
                f"{contents.path} has {len(parts)} Kronecker factors for {len(route.layers)} layers."
            )
        blocks = []
        for index, (part, layer) in enumerate(zip(parts, route.layers, strict=True)):
            inner = read_symmetric(contents, f"sum.{index}.inner", layer.width)
            outer = read_symmetric(contents, f"sum.{index}.outer", layer.outputs)
            a, g, c = (part.number(name, least=0) for name in ("inner_peak", "outer_peak", "count_peak"))
            blocks.append(KroneckerBlock(layer, inner, outer, part.number("count", least=0), (a, g, c)))
        rest = DiagonalSum(contents.tensor("sum.rest", len(route.rest_spans)))
        peak = fields.number("rest_peak", least=0)
        return KroneckerSum(task.selection.n_parameters, tuple(blocks), route.rest_spans, rest, peak)

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        fields = contents.description.part("factor")
        return KroneckerFactor.read(
            contents, fields, total.n_parameters, [b.layer for b in total.blocks], total.rest_spans
        )


def _without_factors(route: LayerwiseRoute, selection: Selection) -> Selection:
    """The parameters in neither a layer nor a norm."""
    starts = {start for layer in route.layers for start in (layer.weight_start, layer.bias_start)}
    starts |= {start for norm in route.norms for _, start in norm.spans}
    slices = selection.slices()
    shapes = dict(zip(selection.names, selection.shapes, strict=True))
    rest = {name: shape for name, shape in shapes.items() if slices[name].start not in starts}
    return Selection(tuple(rest), tuple(rest.values()))


def _say_what_is_diagonal(alone: dict[str, int], n: int) -> None:
    """A notice of the layers, with their parameters, that `kron` cannot factorise and treats as `diag` does.

    Norm layers and other vectors are not mentioned: they have nothing to factorise.
    """
    if alone:
        warnings.warn(
            f"structure='kron' treats {listed_modules(tuple(alone))} as 'diag' does, {sum(alone.values()):,} of {n:,} "
            "parameters: it expected linear layers, and convolutions in one group, whose weights nothing else uses. "
            "Leave them out (parameters=[...]), or use structure='block' or 'lowrank' for the covariances within them.",
            StructureNotice,
            stacklevel=3,
        )


def _by_layer(task: Task) -> LayerwiseRoute:
    assert task.route is not None
    assert task.route.by_layer is not None
    return task.route.by_layer


def cost(work: Workload) -> Cost:
    """A and G of each layer, their eigenvectors and the precisions; in between the workspace of the largest."""
    s, w, classes = work.itemsize, work.network_itemsize, work.classes
    sums = 8 * sum(t.width**2 + t.outputs**2 for t in work.terms) + 8 * work.rest
    bases = sums + 8 * sum(t.size for t in work.terms)
    inner, outer = work.inner_size, work.outer_size
    largest = max([t.width for t in work.terms] + [t.outputs for t in work.terms], default=0)
    uses = max((t.uses * t.width for t in work.terms), default=0)

    each = inner // max(1, len(work.terms))
    sum_samples = samples = samples_at_a_time(work, each + 2 * outer + classes * work.rest, 1)
    seeds = min(classes, layerwise.seeds_at_a_time(samples * outer, samples * work.widest, work.device))
    graph_bytes = kept_bytes(work, samples) if outer or work.rest else 0
    backward = max(
        2 * seeds * samples * (outer + work.widest) * w if outer else 0,
        backward_bytes(work, samples, classes) if work.alone else 0,
    )
    step = s * largest**2 + 2 * s * samples * uses + 3 * 8 * samples * classes
    collect_bytes = sums + graph_bytes + max(backward, step)
    condition_bytes = sums + bases + (_EIGEN_MATRICES - 1) * 8 * largest**2

    samples = samples_at_a_time(work, inner + classes * (outer + work.rest), classes)
    predict_bytes = sums + bases + (s * bases // 8 + s * sum(t.size for t in work.terms) if s < 8 else 0)
    is_factored = len(work.terms) == 1 and not work.rest and work.terms[0].returns_logits
    if is_factored:
        predict_bytes += 2 * 8 * classes**2 + work.draws * classes * w + drawing_bytes(work, full=False)
    else:
        # V of the layer at hand is there three times: as the backward pass leaves it, put together, and rotated.
        predict_bytes += by_layer_bytes(work, samples) + piece_bytes(work, samples) + drawing_bytes(work, full=True)
    once = _EIGEN_PRODUCTS * sum(t.width**3 + t.outputs**3 for t in work.terms)
    products = sum(t.uses * (t.width**2 + (0 if t.returns_logits else classes * t.outputs**2)) for t in work.terms)
    additions = ADDED_PRODUCTS * (sums // 8) / sum_samples
    inputs: float = sum(t.width**2 + t.size for t in work.terms)
    if not is_factored:
        reused_terms = [t for t in work.terms if t.uses > 1]
        inputs = sum(
            t.uses * (t.width**2 + classes * t.outputs**2 + (t.uses > 1) * classes * t.size) for t in work.terms
        )
        inputs += sum(classes**2 * t.size for t in reused_terms)
    passes = backward_passes(work)
    fit_bytes = max(collect_bytes, condition_bytes, sums + bases)
    inputs += drawing_products(work, full=True)
    return Cost(
        sums + bases,
        fit_bytes,
        predict_bytes,
        products + additions,
        float(once),
        inputs,
        (passes, passes),
        exact=False,
        draw_products=float(sum(t.size * (t.width + t.outputs) for t in work.terms)),
    )
