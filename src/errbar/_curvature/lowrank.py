"""The streaming structure: the leading directions of the information, for networks whose n × n matrix is too large.

The information F = Σ_n J_nᵀ Λ_n J_n is approximated by

    F̂ = SᵀS + diag e,   e = diag(F − SᵀS),

with the k rows S of a sketch (`_curvature.sketch`), which never overestimates: 0 ⪯ E = F − SᵀS ⪯ Δ I. Of what the
sketch discards, the diagonal e is put back. It costs n numbers, is exact because diag F is summed beside the sketch,
and so F̂ has the trace and the diagonal of F. Among all diagonal corrections it is nearest to F (Frobenius), and it
keeps the guarantee on both sides, −Δ I ⪯ F − F̂ ⪯ Δ I, as no diagonal entry of E is above its norm. Δ I or Δ/2 I
(robust Frequent Directions) in its place would claim n Δ of information where e₁ + … + e_n is missing: most of the n
directions were never seen.

With D = diag(λ + e) and the prior precision λ, the posterior is exact in F̂ by Woodbury's identity. Write
S D^{−1/2} by its singular values: orthonormal rows Q, squares s. Then

    P = D^{−1/2} (I − Qᵀ diag(s/(1 + s)) Q) D^{−1/2}.

S and Q are stored in the dtype of products, all sums and all k × k matrices are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from errbar._base import linalg
from errbar._base.checks import whole_number
from errbar._base.container import Contents
from errbar._base.memory import require_memory
from errbar._base.triangles import by_columns, laid_out, read_positive
from errbar._curvature.fisher import Fisher, logit_weights
from errbar._curvature.scores import ScoreDraws
from errbar._curvature.sketch import (
    FrequentDirections,
    column_blocks,
    compress,
    orthogonalised,
    squared_sums,
    without_rounding,
)
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
from errbar._curvature.workload import (
    MOVED_PRODUCTS,
    Cost,
    Workload,
    backward_bytes,
    by_device,
    drawing_bytes,
    drawing_products,
    row_bytes,
)
from errbar._derivative.full import pulled_back
from errbar._derivative.route import Derivative
from errbar._derivative.trace import Seeds
from errbar._distributed.team import Team
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import JointLogits, LogitGaussian
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ArgumentError, DamagedFileError, ForgetError, ModelError

# The number of rows, and their bytes, that are computed at a time; the first bounds the memory of the network.
ROWS = {"cpu": 512, "cuda": 4096}
ROW_BYTES = {"cpu": 2**28, "cuda": 2**31}
# The largest J of one input that is held, in bytes: enough for ten classes and 25 million parameters.
JACOBIAN_BYTES = 2**30


def _limit(limits: dict[str, int], device: torch.device) -> int:
    return limits.get(device.type, limits["cpu"])


DEFAULT_RANK = 100


@dataclass(frozen=True, eq=False)
class LowRankSum:
    """S and diag F of Σ_n J_nᵀ Λ_n J_n; `bound` is Δ, `rank` the largest number of rows that sums of it keep.

    Additive up to the compression that brings 2k rows back to k, and whose δ is added to the bounds of both.
    """

    rows: Float[Tensor, "k n"]
    diagonal: Float[Tensor, "n"]
    bound: float
    rank: int

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def mass(self) -> float:
        """tr F of all data seen, exact."""
        return float(self.diagonal.sum())

    @cached_property
    def discarded(self) -> Float[Tensor, "n"]:
        """e, the diagonal of F − SᵀS: what the sketch left out."""
        return (self.diagonal - squared_sums(self.rows)[0]).clamp_min(0)

    @property
    def discarded_mass(self) -> float:
        """tr(F − SᵀS) = tr F − ‖S‖²: what the rows lack, of which only the diagonal is kept."""
        return float(self.discarded.sum())

    def dense(self) -> Float[Tensor, "n n"]:
        """F̂ = SᵀS + diag e in float64; refused where it cannot be held."""
        n = self.rows.shape[1]
        require_memory(16 * n * n, self.device, what=f"The full {n:,} × {n:,} matrix", instead="Use the rows.")
        rows = self.rows.double()
        matrix = rows.T @ rows
        matrix.diagonal().add_(self.discarded)
        return matrix

    def __add__(self, other: LowRankSum) -> LowRankSum:
        rank = max(self.rank, other.rank)
        # A sum is as coarse as its coarsest part, like the products that it is used with (`Information`).
        dtype = min(self.rows.dtype, other.rows.dtype, key=lambda kind: kind.itemsize)
        size = min(rank, len(self.rows) + len(other.rows))
        out = torch.empty(size, self.rows.shape[1], dtype=dtype, device=self.device)
        count, delta = compress(self.rows.to(dtype), other.rows.to(dtype), rank, out)
        return LowRankSum(out[:count], self.diagonal + other.diagonal, self.bound + other.bound + delta, rank)

    def __sub__(self, other: LowRankSum) -> LowRankSum:
        raise ForgetError(
            "A low-rank sketch cannot forget: what was discarded to make room cannot be put back. Collect the "
            "information of the data that remain, or use an exact structure."
        )

    def __mul__(self, factor: float) -> LowRankSum:
        return LowRankSum(self.rows * factor**0.5, self.diagonal * factor, self.bound * factor, self.rank)

    def to(self, device: torch.device) -> LowRankSum:
        return replace(self, rows=self.rows.to(device), diagonal=self.diagonal.to(device))

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> LowRankFactor:
        """D, Q and s. No jitter is ever needed (`limit`): the precision is D plus a Gram matrix."""
        precision = prior_precision + self.discarded
        return LowRankFactor(precision, *orthogonalised(self.rows, precision.rsqrt()))

    def is_zero(self) -> bool:
        return not bool(self.diagonal.any())

    def tolerance(self, dtype: torch.dtype) -> float:
        return 0.0

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        """Always: a Gram matrix and a diagonal."""
        return True

    def reduced(self, has_data: Sequence[bool], team: Team) -> LowRankSum:
        """((rank 0 + rank 1) + rank 2) + …, made by the first rank, which holds two sketches at a time.

        Each merge adds its δ to the bound, and the result is sent to all: nobody else compresses, so that not even
        rounding can tell the ranks apart.
        """
        sizes = team.exchange((len(self.rows), self.bound))
        total: LowRankSum | None = None
        for source, (count, bound) in enumerate(sizes):
            if has_data[source]:
                part = self._room(count) if team.leads and source != 0 else self
                rows = team.brought_to_the_first(part.rows, source)
                diagonal = team.brought_to_the_first(part.diagonal, source)
                total = team.together(_merge(total, LowRankSum(rows, diagonal, bound, self.rank), team))
        count, bound = team.broadcast(None if total is None else (len(total.rows), total.bound))
        result = self._room(count) if total is None else total
        rows, diagonal = team.shared(result.rows, 0), team.shared(result.diagonal, 0)
        return LowRankSum(rows, diagonal, bound, self.rank)

    def _room(self, count: int) -> LowRankSum:
        """Room for a sketch of `count` rows from another rank."""
        rows = torch.empty(count, self.rows.shape[1], dtype=self.rows.dtype, device=self.device)
        return LowRankSum(rows, torch.empty_like(self.diagonal), 0.0, self.rank)

    def written(self) -> tuple[Description, Tensors]:
        small = {"form": "lowrank", "bound": self.bound, "rank": self.rank, "rows": len(self.rows)}
        return small, {"sum.rows": self.rows, "sum.diagonal": self.diagonal}


def _merge(total: LowRankSum | None, other: LowRankSum, team: Team) -> Callable[[], LowRankSum | None]:
    """The merge of the next sketch, which only the first rank does."""
    if not team.leads:
        return lambda: None
    return lambda: other if total is None else total + other


class LowRankAccumulator:
    """Adds up batches; private to one pass over the data, and the only thing here that changes."""

    def __init__(
        self,
        network: Network,
        selection: Selection,
        fisher: Fisher,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        scores: ScoreDraws | None = None,
    ) -> None:
        number = whole_number(rank)
        if number is None or number < 1:
            raise ArgumentError(f"rank is {rank!r}; expected a whole number of one or more.")
        n = selection.n_parameters
        number = min(number, n)
        self.network, self.selection, self.fisher, self.scores = network, selection, fisher, scores
        self.sketch = FrequentDirections(n, number, dtype, device)
        self.is_finite = True

    def add_batch(self, batch: Batch) -> Float[Tensor, "B M"]:
        """Add the rows Rᵀ J of a prepared batch, and return its logits. No J is formed: R is pulled back itself."""
        logits = self.network.logits(batch)
        if not bool(torch.isfinite(logits).all()):
            # The caller checks the logits too, and may have a more precise error to raise first.
            self.is_finite = False
            return logits
        if self.scores is None:
            weights = logit_weights(self.network.kind, self.fisher, logits, batch.labels)
            vectors = weights.thin_root().mT.to(logits.dtype)
        else:
            vectors = self.scores(batch, logits).transpose(0, 1).to(logits.dtype)
        if batch.weights is not None:
            vectors = vectors * batch.weights.sqrt().to(vectors.dtype)[:, None, None]
        size, columns, n = len(logits), vectors.shape[1], self.selection.n_parameters
        device = logits.device
        row_limit = min(_limit(ROWS, device), max(1, _limit(ROW_BYTES, device) // (n * logits.element_size())))
        samples, step = max(1, row_limit // columns), min(row_limit, columns)
        for start in range(0, size, samples):
            part = batch.rows(start, min(start + samples, size))
            for column in range(0, columns, step):
                some_vectors = vectors[start : start + samples, column : column + step]
                self.sketch.add(pulled_back(self.network, self.selection, part, some_vectors).flatten(0, 1))
        return logits

    def finish(self) -> LowRankSum:
        if not self.is_finite:
            raise ModelError("The model returned NaN or infinite logits; expected finite ones. Check its weights.")
        rows = self.sketch.finish()
        return LowRankSum(rows, self.sketch.diagonal, self.sketch.bound, self.sketch.rank)


class LowRankFactor(Refactorised):
    """P = (SᵀS + D)⁻¹ by D, orthonormal directions Q and their strengths s: see the top of this file."""

    # The precision is D plus a Gram matrix, and can always be factorised.
    jitter = 0.0

    def __init__(
        self,
        precision: Float[Tensor, "n"],
        directions: Float[Tensor, "k n"],
        strengths: Float[Tensor, "k"],
    ) -> None:
        self.precision = precision
        self.directions = directions
        self.strengths = strengths
        self.scale = precision.rsqrt()

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Derivative) -> LogitGaussian:
        """N(ĝ, P^g), P^g = J P Jᵀ (eq:linearize), for some inputs whose J has been formed."""
        return LogitGaussian(mean, FullCovariance(self._from_jacobian(derivative.jacobian())))

    def joint_halves(self, derivative: Derivative, rotation: Float[Tensor, "M M"]) -> Iterator[Float[Tensor, "CM k"]]:
        """G and T diag(1 + s)^{−½} of all frames (`_from_jacobian`), whose products add up to QᵀR Q."""
        rows = derivative.of_rotated(rotation).jacobian().flatten(0, 1)
        blocks = list(column_blocks(rows.shape[1], len(rows) + len(self.directions), rows.device))
        projections = self._projections(rows, blocks, rows.dtype)
        for block in blocks:
            yield self._rest(rows, projections, block, rows.dtype)
        yield projections * (1 + self.strengths).rsqrt()

    def gaussian_of_batch(self, network: Network, selection: Selection, batch: Batch) -> LogitGaussian:
        """N(ĝ, P^g) of a prepared batch in bounded memory: J of some inputs at a time, or one class after the other."""
        logits = network.logits(batch)
        size, classes = logits.shape
        jacobian_bytes = classes * selection.n_parameters * logits.element_size()
        device = logits.device
        step = max(1, min(_limit(ROWS, device) // classes, _limit(ROW_BYTES, device) // jacobian_bytes))
        identity = torch.eye(classes, dtype=logits.dtype, device=logits.device)
        covariances = []
        for start in range(0, size, step):
            part = batch.rows(start, min(start + step, size))
            if jacobian_bytes > JACOBIAN_BYTES and not network.keeps_graph:
                covariances.append(self._class_by_class(network, selection, part)[None])
            else:
                vectors = identity.expand(len(part), classes, classes)
                covariances.append(self._from_jacobian(pulled_back(network, selection, part, vectors)))
        return LogitGaussian(logits.to(network.dtype), FullCovariance(torch.cat(covariances)))

    def _from_jacobian(self, jacobian: Float[Tensor, "B M n"]) -> Float[Tensor, "B M M"]:
        """G Gᵀ + T diag(1/(1 + s)) Tᵀ in float64, with T = J D^{−1/2} Qᵀ and G = J D^{−1/2} − T Q.

        The obvious J D⁻¹ Jᵀ − T diag(s/(1 + s)) Tᵀ is a difference of matrices that can be 10⁸ times as large as it.
        Here what Q explains of J is taken out before it is squared: both terms are positive semi-definite whatever
        the rounding, and a relative error ε of Q or T costs ε² of J D⁻¹ Jᵀ.
        """
        size, classes, n = jacobian.shape
        rows = jacobian.reshape(-1, n)
        dtype = torch.promote_types(rows.dtype, self.directions.dtype)
        blocks = list(column_blocks(n, len(rows) + len(self.directions), rows.device))
        projections = self._projections(rows, blocks, dtype)
        total = torch.zeros(size, classes, classes, dtype=torch.float64, device=rows.device)
        for block in blocks:
            rest = self._rest(rows, projections, block, dtype).reshape(size, classes, -1)
            total += rest @ rest.mT
        half = (projections * (1 + self.strengths).rsqrt()).reshape(size, classes, -1)
        return linalg.symmetric(total + half @ half.mT)

    def _projections(self, rows: Float[Tensor, "K n"], blocks: list[slice], dtype: torch.dtype) -> Float[Tensor, "K k"]:
        """T = J D^{−1/2} Qᵀ, summed in float64."""
        total = torch.zeros(len(rows), len(self.directions), dtype=torch.float64, device=rows.device)
        for block in blocks:
            total += self._scaled(rows, block, dtype) @ self.directions[:, block].to(dtype).T
        return total

    def _rest(
        self, rows: Float[Tensor, "K n"], projections: Float[Tensor, "K k"], block: slice, dtype: torch.dtype
    ) -> Float[Tensor, "K b"]:
        """Some columns of G = J D^{−1/2} − T Q."""
        part, directions = self._scaled(rows, block, dtype), self.directions[:, block].to(dtype)
        return torch.addmm(part, projections.to(dtype), directions, alpha=-1)

    def _scaled(self, rows: Float[Tensor, "K n"], block: slice, dtype: torch.dtype) -> Float[Tensor, "K b"]:
        return rows[:, block].to(dtype) * self.scale[block].to(dtype)

    def _class_by_class(self, network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "M M"]:
        """P^g of one input whose J is too large: columns J (P Jᵀ e_m), by one product with Jᵀ and one with J each.

        Jᵀv is linear in v, and its derivative pulled back is the product with J: no forward differentiation is needed.
        """
        values = selection.values(network.module)
        columns, prior_variance = [], 0.0
        with sdpa_kernel(SDPBackend.MATH):
            logits, pull = vjp(lambda parameters: network.logits(batch, parameters)[0], values)[:2]
            push = vjp(lambda vector: pull(vector)[0], torch.zeros_like(logits))[1]
            for vector in torch.eye(len(logits), dtype=logits.dtype, device=logits.device):
                gradient = torch.cat([part.reshape(-1) for part in pull(vector)[0].values()]).to(self.directions.dtype)
                scale = self.scale.to(gradient.dtype)
                scaled_gradient = gradient * scale
                prior_variance = max(prior_variance, float(scaled_gradient.double().square().sum()))
                product = selection.unflatten((self._shrunk(scaled_gradient) * scale)[None])
                columns.append(push({name: product[name][0].to(v.dtype) for name, v in values.items()})[0].double())
        covariance = linalg.symmetric(torch.stack(columns, 1))
        # Rounding of J D^{−1/2} by P^½ Jᵀ, both of them long sums.
        largest = float(covariance.diagonal().abs().max())
        tolerance = 100 * len(logits) * linalg.rounding(network.dtype) * (prior_variance * largest) ** 0.5
        return without_rounding(covariance, tolerance)

    def _shrunk(self, vector: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """(I − Qᵀ diag(s/(1 + s)) Q) v; projected twice, so that nothing of Qᵀ Q v is left over from rounding."""
        weights = self.directions @ vector
        rest = vector - weights @ self.directions
        rest = rest - (self.directions @ rest) @ self.directions
        return rest + (weights.double() / (1 + self.strengths)).to(rest.dtype) @ self.directions

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        """P in float64; refused where it cannot be held."""
        n, device = len(self.precision), self.precision.device
        require_memory(4 * 8 * n * n, device, what=f"A covariance of {n:,} parameters", instead="Use logits.")
        return self._from_jacobian(torch.eye(n, dtype=torch.float64, device=device)[None])[0]

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        """Draws of θ − θ̂ from N(0, P): D^{−1/2} (z − Qᵀ diag(1 − 1/√(1 + s)) Q z)."""
        weights = torch.zeros(len(normal), len(self.directions), dtype=normal.dtype, device=normal.device)
        blocks = list(column_blocks(normal.shape[1], len(normal) + len(self.directions), normal.device))
        for block in blocks:
            weights += normal[:, block] @ self.directions[:, block].to(normal.dtype).T
        weights *= 1 - (1 + self.strengths).rsqrt().to(normal.dtype)
        draws = torch.empty_like(normal)
        for block in blocks:
            rest = torch.addmm(normal[:, block], weights, self.directions[:, block].to(normal.dtype), alpha=-1)
            draws[:, block] = rest * self.scale[block].to(normal.dtype)
        return draws

    def log_determinant_of_precision(self) -> float:
        """ln det(D + SᵀS) = Σ ln D + Σ ln(1 + s)."""
        return float(self.precision.log().sum() + self.strengths.log1p().sum())

    def to(self, device: torch.device) -> LowRankFactor:
        return LowRankFactor(self.precision.to(device), self.directions.to(device), self.strengths.to(device))

    def written(self) -> tuple[Description, Tensors]:
        return {"directions": len(self.directions), "directions_columns": by_columns(self.directions)}, {
            "factor.precision": self.precision,
            "factor.directions": self.directions,
            "factor.strengths": self.strengths,
        }


class LowRankStructure(Structure):
    """A sketch of rows RᵀJ by vector-Jacobian products, for whole networks."""

    name = "lowrank"
    can_be_part = False

    def route(self, network: Network, selection: Selection, batch: Batch) -> None:
        return None

    def rank(self, rank: int) -> int:
        number = whole_number(rank)
        if number is None or number < 1:
            raise ArgumentError(f"rank is {rank!r}; expected a whole number of one or more.")
        return number

    def cost(self, work: Workload) -> Cost:
        return cost(work)

    def accumulator(self, task: Task, rows: Rows | None) -> Accumulator:
        device = task.network.device
        return LowRankAccumulator(task.network, task.selection, task.fisher, task.dtype, device, task.rank, task.scores)

    def gaussians(self, task: Task, factor: Any, batch: Batch) -> Iterator[LogitGaussian]:
        yield factor.gaussian_of_batch(task.network, task.selection, batch)

    def gaussians_of_each(
        self, task: Task, factors: Sequence[Any], batch: Batch
    ) -> Iterator[tuple[LogitGaussian, ...]]:
        """One after the other: what is differentiated is the sketch of each factor."""
        return zip(*(self.gaussians(task, factor, batch) for factor in factors), strict=True)

    def derivatives(
        self, task: Task, batch: Batch, seeds: Seeds | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], Any]]:
        """Each sample by itself; without seeds nothing is formed, see `gaussians`."""
        assert seeds is not None
        n, device = task.selection.n_parameters, task.network.device
        itemsize = task.network.dtype.itemsize
        for part in batch.parts(max(1, _limit(ROW_BYTES, device) // (n * seeds.count * itemsize))):
            logits = task.network.logits(part)
            vectors = seeds(part, logits).transpose(0, 1).to(logits.dtype)
            explicit = pulled_back(task.network, task.selection, part, vectors)
            yield logits, Derivative(n, seeds.count, None, explicit)

    def joint(self, task: Task, factor: Any, batch: Batch) -> JointLogits:
        mean = task.network.logits(batch)
        classes = mean.shape[1]
        identity = torch.eye(classes, dtype=mean.dtype, device=mean.device).expand(len(mean), classes, classes)
        jacobian = pulled_back(task.network, task.selection, batch, identity)
        derivative = Derivative(task.selection.n_parameters, classes, None, jacobian.double())
        return joint_logits(factor, mean, derivative, task.network)

    def read_sum(self, contents: Contents, task: Task) -> Sum:
        fields = contents.description.part("sum")
        fields.choice("form", ("lowrank",))
        rank, n = fields.whole("rank", 1), task.selection.n_parameters
        rows = contents.tensor("sum.rows", min(fields.whole("rows"), rank), n, dtype=task.dtype)
        return LowRankSum(rows, contents.tensor("sum.diagonal", n), fields.number("bound", least=0), rank)

    def read_factor(self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float) -> Factor:
        fields, n = contents.description.part("factor"), len(prior_precision)
        count = fields.whole("directions")
        precision = read_positive(contents, "factor.precision", n)
        directions = contents.tensor("factor.directions", count, n, dtype=total.rows.dtype)
        directions = laid_out(directions, fields.flag("directions_columns"))
        strengths = contents.tensor("factor.strengths", count)
        if not bool((strengths >= 0).all()):
            raise DamagedFileError(f"{contents.path} has negative strengths of directions.")
        return LowRankFactor(precision, directions, strengths)


def cost(work: Workload) -> Cost:
    """k rows and k directions of n numbers; during the fit 2k rows and the rows of some samples."""
    n, s, w, classes = work.n, work.itemsize, work.network_itemsize, work.classes
    rank = min(work.rank, n)
    columns = classes if work.fisher == "eta" else max(1, classes - 1)
    row_limit = int(by_device(ROWS, work.device))
    limit = int(by_device(ROW_BYTES, work.device))
    rows = min(row_limit, max(1, limit // (n * w)))
    samples, seeds = min(work.batch, max(1, rows // columns)), min(rows, columns)

    def rows_bytes(samples: int, seeds: int) -> int:
        return row_bytes(work, samples, seeds) + backward_bytes(work, samples, seeds)

    sketch = rank * n * s
    posterior = 2 * sketch + 3 * 8 * n
    collect_bytes = 2 * sketch + 8 * n + rows_bytes(samples, seeds)
    condition_bytes = posterior + 3 * 8 * max(2**20, 2048 * rank)
    prediction_samples = min(work.batch, max(1, min(row_limit // classes, limit // (classes * n * w))))
    is_large = classes * n * w > JACOBIAN_BYTES
    inputs = rows_bytes(1, 2) + 6 * n * s if is_large else rows_bytes(prediction_samples, classes)
    predict_bytes = posterior + inputs + drawing_bytes(work, full=True)
    # Rows are made, put together, squared in float64, chosen by their weight, and put where they are compressed.
    row_products = 5.0 * rank + MOVED_PRODUCTS * (5 * w + 44 + 2 * (w + s))
    # Squared, and twice scaled in float64, whose multiplications take twice as long.
    once = 2.0 * rank**2 * n + 20.0 * rank**3 + MOVED_PRODUCTS / 2 * (44 + 2 * (s + 24)) * rank * n
    # Made, put together, scaled twice, and what remains of them squared.
    predict_products = classes * n * (2.0 * rank + classes + MOVED_PRODUCTS * (5 * w + 10 * s))
    predict_products += drawing_products(work, full=True)
    fit_bytes = max(collect_bytes, condition_bytes)
    return Cost(
        posterior,
        fit_bytes,
        predict_bytes,
        row_products * n * columns,
        once,
        predict_products,
        (float(columns), float(classes)),
        exact=False,
        draw_products=2.0 * rank * n,
    )
