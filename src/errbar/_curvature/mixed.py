"""Several structures in one posterior: each for some of the parameters, with nothing between them.

The parameters are divided as a `Mixture` says. Each part has the information that its own structure makes of its
parameters alone, and the parts are independent:
    information = blocks of the parts,   P = blocks of the parts,   P^g = Σ_p J_p P_p J_pᵀ,
    R_ij = Σ_p J_ip P_p J_jpᵀ,   ln det P = Σ_p ln det P_p.
So everything here is a sum over the parts, or one after the other. Labels that are drawn (`fisher="sampled"`) follow
from the samples, and are the same for all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.container import Contents
from errbar._base.memory import require_memory
from errbar._curvature.mixture import Mixture
from errbar._curvature.structure import (
    Accumulator,
    Description,
    Factor,
    Refactorised,
    Rows,
    Structure,
    Sum,
    Tensors,
    joint_logits,
)
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload, drawing_bytes, drawing_products
from errbar._derivative.layers import Spans
from errbar._derivative.trace import TopClasses
from errbar._distributed.team import Team
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._model.batch import Batch
from errbar._model.selection import Selection
from errbar.errors import DamagedFileError, MismatchError

# The covariances of logits that are held at a time, of one part beside their sum.
_COVARIANCE_BYTES = 2**27


def _spans(task: Task) -> tuple[Spans, ...]:
    """Where the parameters of each part lie in the flat vector."""
    return tuple(Spans.of(task.selection, set(part.selection.names)) for part in task.parts)


def _assembled(spans: Sequence[Spans], matrices: Iterable[Float[Tensor, "k k"]], device: torch.device) -> Tensor:
    """The blocks of the parts as one matrix; refused where that cannot be held."""
    n = sum(len(own) for own in spans)
    require_memory(8 * n * n, device, what=f"The full {n:,} × {n:,} matrix", instead="Use logits and predict.")
    whole = torch.zeros(n, n, dtype=torch.float64, device=device)
    for own, matrix in zip(spans, matrices, strict=True):
        positions = own.positions(device)
        whole[positions[:, None], positions[None, :]] = matrix
    return whole


@dataclass(frozen=True, eq=False)
class MixedSum:
    """The sums of the parts; additive, because each of them is."""

    spans: tuple[Spans, ...]
    totals: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.totals[0].device
        return device

    def dense(self) -> Float[Tensor, "n n"]:
        return _assembled(self.spans, (total.dense() for total in self.totals), self.device)

    def __add__(self, other: MixedSum) -> MixedSum:
        return self._with(a + b for a, b in self._pairs(other))

    def __sub__(self, other: MixedSum) -> MixedSum:
        return self._with(a - b for a, b in self._pairs(other))

    def __mul__(self, factor: float) -> MixedSum:
        return self._with(total * factor for total in self.totals)

    def to(self, device: torch.device) -> MixedSum:
        return self._with(total.to(device) for total in self.totals)

    def _with(self, totals: Iterable[Any]) -> MixedSum:
        return MixedSum(self.spans, tuple(totals))

    def _pairs(self, other: MixedSum) -> list[tuple[Any, Any]]:
        pairs = list(zip(self.totals, other.totals, strict=True))
        if any(type(a) is not type(b) for a, b in pairs):
            raise MismatchError(
                "Information that was summed in different forms cannot be combined: the first batches of the two "
                "showed different layers."
            )
        return pairs

    def tolerance(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """One for each part: they have scales of their own."""
        return tuple(total.tolerance(dtype) for total in self.totals)

    def is_positive_semidefinite(self, tolerance: tuple[Any, ...]) -> bool:
        pairs = zip(self.totals, tolerance, strict=True)
        return all(total.is_positive_semidefinite(own) for total, own in pairs)

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> MixedFactor:
        pairs = zip(self.spans, self.totals, strict=True)
        return MixedFactor(self.spans, tuple(total.condition(own.take(prior_precision), limit) for own, total in pairs))

    def is_zero(self) -> bool:
        return all(total.is_zero() for total in self.totals)

    def reduced(self, has_data: Sequence[bool], team: Team) -> MixedSum:
        return self._with(total.reduced(has_data, team) for total in self.totals)

    def written(self) -> tuple[Description, Tensors]:
        parts, arrays = _written(self.totals, "sum")
        return {"form": "mixed", "parts": parts}, arrays


class MixedFactor(Refactorised):
    """P_p of each part."""

    def __init__(self, spans: tuple[Spans, ...], factors: tuple[Any, ...]) -> None:
        self.spans = spans
        self.factors = factors

    @property
    def jitter(self) -> float:
        """The largest jitter that any part needed."""
        return max(float(factor.jitter) for factor in self.factors)

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        matrices = [factor.covariance for factor in self.factors]
        return _assembled(self.spans, matrices, matrices[0].device)

    def joint_halves(
        self, derivative: MixedDerivative, rotation: Float[Tensor, "M M"]
    ) -> Iterator[Float[Tensor, "CM k"]]:
        """W of each part, with Σ W Wᵀ = QᵀR Q."""
        for factor, part in zip(self.factors, derivative.parts, strict=True):
            yield from factor.joint_halves(part, rotation)

    def joint_covariance(self, derivative: MixedDerivative) -> Float[Tensor, "C M C M"]:
        """R_ij = Σ_p J_ip P_p J_jpᵀ, of parts that have no shorter way by their halves in the logits themselves."""
        frames, classes = derivative.shape
        identity = torch.eye(classes, dtype=torch.float64, device=derivative.device)
        total = torch.zeros(frames, classes, frames, classes, dtype=torch.float64, device=derivative.device)
        for factor, part in zip(self.factors, derivative.parts, strict=True):
            if hasattr(factor, "joint_covariance"):
                total += factor.joint_covariance(part)
                continue
            for half in factor.joint_halves(part, identity):
                total += (half @ half.mT).reshape(total.shape)
        return total

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P), in the order of the flat vector, in the place of `normal`: draws of millions of
        parameters are not held three times.
        """
        draws = torch.empty_like(normal) if normal.requires_grad else normal
        for own, factor in zip(self.spans, self.factors, strict=True):
            own.put_(draws, factor.sample(own.take(normal)))
        return draws

    def log_determinant_of_precision(self) -> float:
        return float(sum(factor.log_determinant_of_precision() for factor in self.factors))

    def rounding_share(self, prior_precision: Float[Tensor, "n"]) -> float:
        pairs = zip(self.spans, self.factors, strict=True)
        return max(float(factor.rounding_share(own.take(prior_precision))) for own, factor in pairs)

    def to(self, device: torch.device) -> MixedFactor:
        return MixedFactor(self.spans, tuple(factor.to(device) for factor in self.factors))

    def written(self) -> tuple[Description, Tensors]:
        parts, arrays = _written(self.factors, "factor")
        return {"parts": parts}, arrays


@dataclass(frozen=True, eq=False)
class MixedDerivative:
    """J of some frames, by part."""

    n_parameters: int
    shape: tuple[int, int]
    device: torch.device
    parts: tuple[Any, ...]


class MixedAccumulator:
    """Adds up the batches part by part; private to one pass over the data."""

    def __init__(self, spans: tuple[Spans, ...], parts: Sequence[Accumulator]) -> None:
        self.spans, self.parts = spans, parts

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]:
        logits = [part.add_batch(batch) for part in self.parts]
        return logits[0]

    def finish(self) -> MixedSum:
        return MixedSum(self.spans, tuple(part.finish() for part in self.parts))


class MixedStructure(Structure):
    """The structures of a mixture, each for its own parameters."""

    name = "mixed"

    def __init__(self, mixture: Mixture, structures: Mapping[str, Structure]) -> None:
        self.mixture, self.structures = mixture, structures

    def _of(self, task: Task) -> Iterator[tuple[Structure, Task]]:
        return ((self.structures[part.structure], part) for part in task.parts)

    def divided(self, task: Task) -> tuple[Task, ...]:
        """The tasks of the parts, without their routes."""
        selections: dict[str, Selection] = self.mixture.selections(task.selection)
        return tuple(replace(task, structure=name, selection=own) for name, own in selections.items())

    def routed(self, task: Task, batch: Batch, rank: int) -> Task:
        parts = (self.structures[part.structure].routed(part, batch, rank) for part in self.divided(task))
        return replace(task, parts=tuple(parts))

    def cost(self, work: Workload) -> Cost:
        assigned = self.mixture.assigned(work.names)
        return _summed_cost([self.structures[name].cost(work.of_names(own)) for name, own in assigned.items()], work)

    def accumulator(self, task: Task, rows: Rows | None) -> Accumulator:
        return MixedAccumulator(_spans(task), [structure.accumulator(part, None) for structure, part in self._of(task)])

    def gaussians(self, task: Task, factor: MixedFactor, batch: Batch) -> Iterator[LogitGaussian]:
        """N(ĝ, P^g), P^g = Σ_p J_p P_p J_pᵀ."""
        for piece in batch.parts(_inputs_at_a_time(task.n_classes)):
            yield self._summed(task, factor, piece)

    def gaussians_of_each(
        self, task: Task, factors: Sequence[Any], batch: Batch
    ) -> Iterator[tuple[LogitGaussian, ...]]:
        """One after the other."""
        return zip(*(self.gaussians(task, factor, batch) for factor in factors), strict=True)

    def top_gaussians(self, task: Task, factor: MixedFactor, batch: Batch, top: int) -> Iterator[LogitGaussian]:
        for piece in batch.parts(_inputs_at_a_time(top)):
            whole = self._summed(task, factor, piece, top)
            if whole.classes is not None:
                yield whole
                continue
            # Logits that are equal up to rounding came in another order in another pass.
            for gaussian in self.gaussians(task, factor, piece):
                yield gaussian.of_classes(TopClasses(top).classes(gaussian.mean))

    def _summed(self, task: Task, factor: MixedFactor, batch: Batch, top: int | None = None) -> LogitGaussian:
        """The sum of independent deviations from one mean; `classes` is None where the parts have different ones."""
        first: LogitGaussian | None = None
        total: Tensor | None = None
        classes: Tensor | None = None
        for (structure, part), own in zip(self._of(task), factor.factors, strict=True):
            if top is None:
                gaussian = LogitGaussian.concatenated(list(structure.gaussians(part, own, batch)))
            else:
                gaussian = LogitGaussian.concatenated(list(structure.top_gaussians(part, own, batch, top)))
            if first is None or total is None:
                first, total, classes = gaussian, gaussian.covariance, gaussian.classes
                continue
            total = total + gaussian.covariance
            if classes is not None and (gaussian.classes is None or not torch.equal(classes, gaussian.classes)):
                classes = None
        assert first is not None
        assert total is not None
        return LogitGaussian(first.mean, FullCovariance(linalg.symmetric(total)), classes=classes)

    def joint(self, task: Task, factor: MixedFactor, batch: Batch) -> JointLogits:
        pairs = [structure.whole_derivative(part, batch) for structure, part in self._of(task)]
        mean = pairs[0][0]
        frames, classes = mean.shape
        derivatives = tuple(derivative for _, derivative in pairs)
        whole = MixedDerivative(task.selection.n_parameters, (frames, classes), mean.device, derivatives)
        return joint_logits(factor, mean, whole, task.network)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        contents.description.part("sum").choice("form", ("mixed",))
        views = _views(contents, "sum", len(task.parts))
        pairs = zip(self._of(task), views, strict=True)
        return MixedSum(_spans(task), tuple(structure.read_sum(view, part) for (structure, part), view in pairs))

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        views = _views(contents, "factor", len(total.totals))
        names = self._names(contents, len(views))
        factors = [
            self.structures[name].read_factor(view, part, own.take(prior_precision), limit)
            for name, view, part, own in zip(names, views, total.totals, total.spans, strict=True)
        ]
        return MixedFactor(total.spans, tuple(factors))

    def _names(self, contents: Contents, count: int) -> list[str]:
        """The structures of the parts, as a file has them."""
        parameters = [part.text("name") for part in contents.description.parts("parameters")]
        names = list(self.mixture.assigned(parameters))
        assert len(names) == count
        return names


def _inputs_at_a_time(classes: int) -> int:
    return max(1, _COVARIANCE_BYTES // (8 * classes**2))


def _written(parts: Sequence[Any], name: str) -> tuple[list[Description], Tensors]:
    """The descriptions of the parts, and their arrays with the number of the part in the name."""
    descriptions: list[Description] = []
    whole: Tensors = {}
    for index, part in enumerate(parts):
        small, arrays = part.written()
        descriptions.append(small)
        whole |= {f"{name}.{index}{key.removeprefix(name)}": array for key, array in arrays.items()}
    return descriptions, whole


def _views(contents: Contents, name: str, count: int) -> list[Contents]:
    """The contents as each part has written them."""
    parts = contents.description.part(name).parts("parts")
    if len(parts) != count:
        raise DamagedFileError(f"{contents.path} has {len(parts)} parts of its {name} for {count} structures.")
    views = []
    for index, part in enumerate(parts):
        prefix = f"{name}.{index}"
        arrays = {
            f"{name}{key.removeprefix(prefix)}": array
            for key, array in contents.tensors.items()
            if key == prefix or key.startswith(f"{prefix}.")
        }
        views.append(replace(contents, description=part.under(name), tensors=arrays))
    return views


def _summed_cost(parts: Sequence[Cost], work: Workload) -> Cost:
    """All parts are held; each works by itself, beside what the others hold. Monte Carlo is done once."""
    posterior = sum(part.posterior_bytes for part in parts)
    others = [posterior - part.posterior_bytes for part in parts]
    again = len(parts) - 1
    seeds = [reduce(add, values) for values in zip(*(part.seeds for part in parts), strict=True)]
    return Cost(
        posterior,
        max(part.fit_bytes + rest for part, rest in zip(parts, others, strict=True)),
        sum(part.predict_bytes for part in parts) - again * drawing_bytes(work, full=False),
        sum(part.sample_products for part in parts),
        sum(part.once_products for part in parts),
        sum(part.input_products for part in parts) - again * drawing_products(work, full=False),
        (seeds[0], seeds[1]),
        exact=False,
        first_products=sum(part.first_products for part in parts),
        draw_products=sum(part.draw_products for part in parts),
    )
