"""From an input to the PMF and its error bars, as one module of elementary operations: the content of an export.

It computes what `posterior.predict` computes, with the same draws, in the same dtypes, and without anything that a
graph cannot hold: no automatic differentiation, no library factorisations, no choices by values in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base import linalg
from errbar._curvature.structure import ClassCoefficients, GraphCovariance, PairCoefficients
from errbar._distributions.calibration import Calibration
from errbar._export.chain import ChainedNetwork
from errbar._export.covariance import ClassVariance, FullCovariance, IndependentCovariance, OutputVariance
from errbar._model.outputs import CLASSES, OutputKind
from errbar.errors import ExportError

# The Cholesky factorisation is written out column by column, six operations each.
MOST_CLASSES = 128
# Numbers that are added without a loss that matters.
_FEW = 16


@dataclass(frozen=True, eq=False)
class Draws:
    """How the logits are sampled: the same for every input. Before that they are divided by `temperature`."""

    normal: Float[Tensor, "d K"]
    thresholds: Float[Tensor, "R M"]
    temperature: float = 1.0
    level: float = 0.95


def _times(matrices: Float[Tensor, "B *d"], factor: float) -> Float[Tensor, "B *d"]:
    """`matrices * factor` by as many numbers as a matrix has.

    ONNX Runtime makes one operation of a product of matrices and a number, in which the number is float32.
    """
    return matrices * torch.full(matrices.shape[1:], factor, dtype=matrices.dtype)


def _divided(values: Float[Tensor, "B *d"], number: float) -> Float[Tensor, "B *d"]:
    """`values / number` in the same way: it may come before or after a product of matrices."""
    return values / torch.full(values.shape[1:], number, dtype=values.dtype)


def cholesky(matrix: Float[Tensor, "B m m"], shares: Sequence[float]) -> Float[Tensor, "B m m"]:
    """Lower Cholesky factors, as `linalg.safe_cholesky` makes them: with the first of the `shares` of its mean
    diagonal added that makes a matrix positive definite; zero for zero, and NaN where none does.

    All shares are tried at once, column after column: what is below and right of the pivot a₁₁ loses a aᵀ/a₁₁, and at
    the end each column is divided by the root of its pivot. A pivot that is not positive makes a root that is not
    positive, NaN included. Inputs are in the last dimension, where they are next to each other in memory.
    """
    size = matrix.shape[-1]
    identity = torch.eye(size, dtype=matrix.dtype)
    scale = (matrix * identity).sum((1, 2)) / size
    jitter = torch.tensor(shares, dtype=matrix.dtype)[:, None] * scale
    rest = matrix.permute(1, 2, 0)[:, :, None, :] + identity[:, :, None, None] * jitter
    columns, pivots = [], []
    for j in range(size):
        left, right = rest.split([1, size - j - 1], 1) if j + 1 < size else (rest, rest)
        columns.append(left)
        if j + 1 < size:
            pivot, below = left.split([1, size - j - 1], 0)
            row, corner = right.split([1, size - j - 1], 0)
            rest = corner - below * (row / pivot)
        pivots.append(pivot if j + 1 < size else rest)
    roots = torch.cat(pivots).sqrt()
    column, place = torch.triu_indices(size, size)
    lower = (torch.cat(columns) / roots.index_select(0, column))[:, 0]
    good = (roots > 0).all(0)[0]
    first = good.float().argmax(0, keepdim=True)
    chosen = lower.gather(1, first.expand(len(column), 1, -1))[:, 0]
    chosen = torch.where(good.any(0), chosen, torch.nan)
    # Entries that are exactly zero everywhere stay exactly zero.
    chosen = torch.where(matrix.abs().amax((1, 2)) == 0, 0.0, chosen)
    index = torch.zeros(size, size, dtype=torch.long)
    index[place, column] = torch.arange(len(column))
    return chosen.index_select(0, index.flatten()).reshape(size, size, -1).permute(2, 0, 1) * identity.cumsum(1).mT


def positive_inverse(matrix: Float[Tensor, "B m m"]) -> Float[Tensor, "B m m"]:
    """Inverses of positive definite matrices, NaN for others: m sweeps, each of one row and column.

    A sweep of k with pivot p = a_kk takes a_ij to a_ij − a_ik a_kj/p, a_kj to a_kj/p, and p to −1/p; after all of them
    the matrix is −A⁻¹. Pivots of a positive definite matrix are positive, so there is nothing to exchange.
    """
    size = matrix.shape[-1]
    ones = torch.ones(size, dtype=matrix.dtype)
    swept = matrix
    for k in range(size):
        others = ones - torch.eye(size, dtype=matrix.dtype)[k]
        column = swept[:, :, k]
        pivot = column[:, k : k + 1]
        pivot = torch.where(pivot > 0, pivot, torch.nan)
        share = column * others / pivot
        rest = swept * (others[:, None] * others) - (column * others)[:, :, None] * share[:, None, :]
        unit = ones - others
        edge = share[:, :, None] * unit + unit[:, None] * share[:, None, :]
        swept = rest + edge - (unit[:, None] * unit) / pivot[:, :, None]
    return linalg.symmetric(-swept)


def full_matrices(
    form: str, covariance: Float[Tensor, "B ..."], basis: Float[Tensor, "M r"] | None
) -> Float[Tensor, "B M M"]:
    """P^g of one of the forms as matrices."""
    if form == "full":
        return covariance
    if form == "diagonal" or basis is None:
        return torch.diag_embed(covariance)
    half = basis.to(covariance.dtype) * covariance.clamp_min(0).sqrt()[:, None, :]
    return half @ half.mT


class GaussianGraph(nn.Module):
    """Input → network → terms V ⊗ hᵀ → ĝ and P^g, calibrated.

    `form` is that of P^g: "full", "diagonal" (variances of the logits), or "factored", Q diag(w) Qᵀ with `basis` Q.
    Of several labels T and T_c of each are `label_factors` (rows t and s) times those of all.
    """

    start: Tensor | None
    basis: Tensor | None
    label_factors: Tensor | None

    def __init__(
        self,
        network: ChainedNetwork,
        covariance: nn.Module,
        calibration: Calibration,
        *,
        form: str,
        start: Float[Tensor, "M c"] | None,
        basis: Float[Tensor, "M r"] | None,
        dtype: torch.dtype,
        kind: OutputKind = CLASSES,
        label_factors: Float[Tensor, "2 L"] | None = None,
    ) -> None:
        super().__init__()
        self.network, self.covariance, self.calibration = network, covariance, calibration
        self.kind, self.dtype, self.made = kind, dtype, form
        # What varies from label to label and from input to input leaves no basis that all inputs share.
        self.form = "full" if form == "factored" and not kind.has_gauge and calibration.softening > 0 else form
        if label_factors is not None and basis is not None and self.form == "factored":
            basis = basis * _deviation_factors(label_factors).to(basis.dtype)[:, None]
        self.register_buffer("start", None if start is None else start.to(dtype))
        self.register_buffer("basis", basis)
        self.register_buffer("label_factors", label_factors)

    def forward(self, *inputs: Tensor) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B ..."]]:
        output, values = self.network(*inputs)
        # One logit g of two classes is read as the pair (0, g).
        is_pair = self.kind.has_gauge and output.shape[1] == 1
        mean = torch.cat([torch.zeros_like(output), output], 1) if is_pair else output
        return self.calibrated(mean, self.covariance(self.network.terms(values, self.start, self.dtype)))

    def calibrated(self, mean: Float[Tensor, "B M"], covariance: Float[Tensor, "B ..."]) -> tuple[Tensor, Tensor]:
        """ĝ/T(x) and T_c P^g/T(x)², as `LogitGaussian.calibrated` has them; T(x) is a constant without softening."""
        T, scale = self.calibration.temperature, self.calibration.covariance_scale
        if not self.kind.has_gauge:
            return self._with_label_factors(*self._calibrated_labels(mean, covariance))
        if self.calibration.softening == 0:
            return _divided(mean, T), _times(covariance, scale / T**2)
        each = self.calibration.temperatures(self.contrast_variance(covariance, mean.shape[1]))
        divisor = each.square().to(covariance.dtype).reshape(-1, *[1] * (covariance.ndim - 1))
        return mean / each.to(mean.dtype)[:, None], _times(covariance / divisor, scale)

    def _calibrated_labels(
        self, mean: Float[Tensor, "B L"], covariance: Float[Tensor, "B ..."]
    ) -> tuple[Tensor, Tensor]:
        """The same of several labels, each with a T(x) of its own by half of its variance."""
        T, scale = self.calibration.temperature, self.calibration.covariance_scale
        if self.calibration.softening == 0:
            return _divided(mean, T), _times(covariance, scale / T**2)
        if self.made != "diagonal":
            covariance = full_matrices(self.made, covariance, self.basis)
            variance = (covariance * torch.eye(mean.shape[1], dtype=covariance.dtype)).sum(2)
        else:
            variance = covariance
        each = self.calibration.temperatures(variance / 2)
        return mean / each.to(mean.dtype), _times(_rescaled(covariance, 1 / each), scale)

    def _with_label_factors(
        self, mean: Float[Tensor, "B L"], covariance: Float[Tensor, "B ..."]
    ) -> tuple[Tensor, Tensor]:
        """As `LogitGaussian.with_label_factors` has them; a basis has them in it already."""
        factors = self.label_factors
        if factors is None:
            return mean, covariance
        if self.form != "factored":
            covariance = _rescaled(covariance, _deviation_factors(factors))
        return mean / factors[0].to(mean.dtype), covariance

    def contrast_variance(self, covariance: Float[Tensor, "B ..."], classes: int) -> Float[Tensor, "B"]:
        """The mean variance of the M−1 contrasts, in the form at hand. No product of matrices, see `_times`."""
        if self.form == "diagonal":
            return covariance.mean(1)
        if self.form == "full":
            diagonal = (covariance * torch.eye(classes, dtype=covariance.dtype)).sum((1, 2))
            total = diagonal - covariance.sum((1, 2)) / classes
        else:
            basis = self.get_buffer("basis")
            total = (covariance * (basis - basis.mean(0)).square().sum(0).to(covariance.dtype)).sum(1)
        return total.clamp_min(0) / (classes - 1)


def _deviation_factors(label_factors: Float[Tensor, "2 L"]) -> Float[Tensor, "L"]:
    """√s/t of each label."""
    return label_factors[1].sqrt() / label_factors[0]


def _rescaled(covariance: Float[Tensor, "B ..."], by: Float[Tensor, "*B L"]) -> Float[Tensor, "B ..."]:
    """diag a P^g diag a, of matrices or of variances."""
    factors = by.to(covariance.dtype)
    if covariance.ndim == 2:
        return covariance * factors.square()
    return covariance * factors[..., :, None] * factors[..., None, :]


class FusedGraph(nn.Module):
    """Inputs → ĝ_c and P_c of each network → N(ĝ, q P) of the fusion, as `FusedClassifier.logits` has it.

    Q_c = a_c P_c + s_c I on contrasts, P = (Σ Q_c⁻¹)⁻¹, ĝ = P Σ Q_c⁻¹ ĝ_c, in float64. `places` says which inputs each
    network takes, and in which dtype; `dtype` is that of the mean.
    """

    form, basis, kind = "full", None, CLASSES

    def __init__(
        self,
        networks: Sequence[GaussianGraph],
        places: Sequence[Sequence[tuple[int, torch.dtype]]],
        *,
        classes: int,
        dtype: torch.dtype,
        scales: Sequence[float],
        discrepancies: Sequence[float],
        covariance_scale: float,
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.places, self.dtype = [list(own) for own in places], dtype
        self.scales, self.discrepancies, self.covariance_scale = list(scales), list(discrepancies), covariance_scale
        for c, discrepancy in enumerate(discrepancies):
            if math.isfinite(discrepancy):
                # As a matrix: a runtime may keep a number beside a product of matrices in float32, see `_times`.
                self.register_buffer(f"added_{c}", discrepancy * torch.eye(classes - 1, dtype=torch.float64))

    def forward(self, *inputs: Tensor) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M M"]]:
        means, covariances = [], []
        for network, places in zip(self.networks, self.places, strict=True):
            assert isinstance(network, GaussianGraph)
            mean, covariance = network(*(inputs[place].to(dtype) for place, dtype in places))
            basis = linalg.contrast_basis(mean.shape[1], mean.device)
            means.append(mean.double() @ basis)
            full = full_matrices(network.form, covariance, network.basis).double()
            covariances.append(linalg.symmetric(basis.mT @ full @ basis))
        mean, covariance = self.fused(means, covariances)
        spread = linalg.symmetric(basis @ _times(covariance, self.covariance_scale) @ basis.mT)
        return (mean @ basis.mT).to(self.dtype), spread

    def fused(self, means: Sequence[Tensor], covariances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """ĝ and P on contrasts, as `FusedClassifier` has them."""
        taking_part = [c for c, s in enumerate(self.discrepancies) if math.isfinite(s)]
        if not taking_part:
            return torch.stack(list(means)).mean(0), torch.zeros_like(covariances[0])
        widened = {c: _times(covariances[c], self.scales[c]) + self.get_buffer(f"added_{c}") for c in taking_part}
        if len(taking_part) == 1:
            (only,) = taking_part
            return means[only], widened[only]
        precisions = {c: positive_inverse(widened[c]) for c in taking_part}
        covariance = positive_inverse(torch.stack([*precisions.values()]).sum(0))
        vectors = [(precision @ means[c][:, :, None])[:, :, 0] for c, precision in precisions.items()]
        return (covariance @ torch.stack(vectors).sum(0)[:, :, None])[:, :, 0], covariance


class PredictionGraph(nn.Module):
    """Input → Gaussian over the logits → samples of the PMF → what they tell."""

    basis: Tensor | None

    def __init__(
        self, gaussian: GaussianGraph | FusedGraph, draws: Draws, *, dtype: torch.dtype, outputs: Sequence[str]
    ) -> None:
        super().__init__()
        self.gaussian, self.form, self.outputs = gaussian, gaussian.form, tuple(outputs)
        self.kind: OutputKind = gaussian.kind
        self.temperature = draws.temperature
        # Outside what is traced: a graph chooses by no values.
        self.ranks = interval_ranks(draws.level, draws.normal.shape[1], draws.normal.dtype)
        self.shares = [0.0, *linalg.jitters(linalg.largest_jitter(dtype))]
        # The longest first: a search for the ends of an interval finds most of them there, and replaces few later.
        normal = draws.normal[:, draws.normal.square().sum(0).argsort(descending=True)]
        self.register_buffer("normal", normal)
        self.register_buffer("thresholds", draws.thresholds)
        self.register_buffer("basis", gaussian.basis)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        mean, covariance = self.gaussian(*args, *kwargs.values())
        T = self.temperature
        tempered = (mean, covariance) if T == 1 else (_divided(mean, T), _times(covariance, 1 / T**2))
        samples = self.sampled_pmfs(*tempered)
        pmf = mean_of_draws(samples)
        results = {"pmf": pmf}
        if "covariance" in self.outputs:
            deviations = (samples - pmf[:, :, None]).double()
            results["covariance"] = _times(deviations @ deviations.mT, 1 / samples.shape[2]).to(samples.dtype)
        if {"std", "mutual_information"} & set(self.outputs):
            shares = Shares.of(samples, pmf)
            results["std"] = shares.deviation()
        results["logits"] = mean
        if "logit_covariance" in self.outputs:
            results["logit_covariance"] = full_matrices(self.form, covariance, self.basis).to(mean.dtype)
        if "risk" in self.outputs:
            # NaN is above no threshold, but must not look like zero risk.
            unknown = torch.isnan(pmf)[:, None, :]
            share = torch.stack(
                [(samples > limit[:, None]).to(pmf.dtype).mean(2) for limit in self.get_buffer("thresholds")], 1
            )
            results["risk"] = torch.where(unknown, torch.nan, share)
        if {"lower", "upper"} & set(self.outputs):
            results["lower"], results["upper"] = interval_of_draws(samples, pmf, self.ranks)
        if "mutual_information" in self.outputs:
            results["mutual_information"] = shares.information(self.kind)
        return {name: results[name] for name in self.outputs}

    def sampled_pmfs(self, mean: Float[Tensor, "B M"], covariance: Float[Tensor, "B ..."]) -> Float[Tensor, "B M K"]:
        if not self.kind.has_gauge:
            return torch.sigmoid(self.sampled_logits(mean, covariance))
        logits = self.sampled_logits(mean - mean.amax(1, keepdim=True), covariance)
        # Written out: runtimes are slow at a softmax that is not over the last dimension.
        exponentials = (logits - logits.amax(1, keepdim=True)).exp()
        return exponentials / exponentials.sum(1, keepdim=True)

    def sampled_logits(self, mean: Float[Tensor, "B M"], covariance: Float[Tensor, "B ..."]) -> Float[Tensor, "B M K"]:
        """ĝ + A z⁽ᵏ⁾ for all draws: eq:gmarg before the softmax, with the root A that `predict` takes."""
        normal = self.get_buffer("normal")
        if self.form == "full" and not self.kind.has_gauge:
            lower = cholesky(linalg.symmetric(covariance.double()), self.shares)
            return lower.to(mean.dtype) @ normal + mean[:, :, None]
        if self.form == "full":
            basis = linalg.contrast_basis(mean.shape[1], mean.device)
            lower = cholesky(linalg.symmetric(basis.mT @ covariance.double() @ basis), self.shares)
            root = (basis @ lower).to(mean.dtype)
            # The mean as one more column: adding it afterwards would be one more pass over all draws.
            return torch.cat([root, mean[:, :, None]], 2) @ torch.cat([normal, torch.ones_like(normal[:1])])
        deviations = covariance.clamp_min(0).sqrt().to(mean.dtype)[:, :, None] * normal
        if self.form == "factored":
            basis = self.get_buffer("basis")
            centred = basis - basis.mean(0) if self.kind.has_gauge else basis
            deviations = centred.to(mean.dtype) @ deviations
        return deviations + mean[:, :, None]


def interval_ranks(level: float, count: int, dtype: torch.dtype) -> tuple[float, float]:
    """Where both ends of an interval lie among so many sorted samples, with the rounding of `_base.quantiles`."""
    low, high = (torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=dtype) * (count - 1)).tolist()
    return low, high


def interval_of_draws(
    samples: Float[Tensor, "B M K"], pmf: Float[Tensor, "B M"], ranks: tuple[float, float]
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
    """The quantiles of both tails, as `_base.quantiles` has them, from the fewest and the most of the samples alone."""
    count = samples.shape[2]
    ends = []
    for rank, largest in zip(ranks, (False, True), strict=True):
        # In either order both neighbours of the rank are the last two; a rank without fraction is its own.
        place = count - 1 - rank if largest else rank
        first = math.floor(place)
        found = torch.topk(samples, min(first + 2, count), dim=2, largest=largest, sorted=False).values
        last = torch.topk(found, min(2, found.shape[2]), dim=2, largest=not largest).values
        far, near = last[:, :, 0], last[:, :, min(first + 2, count) - 1 - first]
        # As a tensor: a number would be float32 in the file, see `_times`.
        ends.append(near + _times(far - near, place - first))
    lower, upper = (torch.where(torch.isnan(pmf), torch.nan, end) for end in ends)
    return lower, upper


def mean_of_draws(values: Float[Tensor, "B M K"]) -> Float[Tensor, "B M"]:
    """The mean over K, of sums of a few in their own dtype and of these in float64.

    Runtimes add one after the other, so that rounding of equal samples adds up (1e-4 at K = 10⁵). Not by
    mean(dtype=...), which torch.onnx writes as a mean and then a cast.
    """
    _, M, K = values.shape
    few = max(size for size in range(1, _FEW + 1) if K % size == 0)
    sums = values if few == 1 else values.reshape(-1, M, few, K // few).sum(2)
    return _divided(sums.double().sum(2), K).to(values.dtype)


@dataclass(frozen=True, eq=False)
class Shares:
    """r = f_m⁽ᵏ⁾/f̂_m and r − 1, which is exact near 1."""

    samples: Float[Tensor, "B M K"]
    pmf: Float[Tensor, "B M"]
    ratio: Float[Tensor, "B M K"]
    excess: Float[Tensor, "B M K"]

    @staticmethod
    def of(samples: Float[Tensor, "B M K"], pmf: Float[Tensor, "B M"]) -> Shares:
        ratio = samples / pmf.clamp_min(torch.finfo(samples.dtype).tiny)[:, :, None]
        return Shares(samples, pmf, ratio, ratio - 1)

    def deviation(self) -> Float[Tensor, "B M"]:
        """f̂_m √((1/K) Σ_k (r − 1)²), the standard deviation: squares of small f would vanish."""
        return self.pmf * mean_of_draws(self.excess.square()).sqrt()

    def information(self, kind: OutputKind = CLASSES) -> Float[Tensor, "B *L"]:
        """(1/K) Σ_k Σ_m f̂_m (r ln r − r + 1), as `Prediction.mutual_information` has it; of several labels that of
        each, as of two classes."""
        if not kind.has_gauge:
            others = Shares.of(1 - self.samples, 1 - self.pmf)
            return (self._information() + others._information()).clamp_min(0)
        return self._information().sum(1).clamp_min(0)

    def _information(self) -> Float[Tensor, "B M"]:
        """That of each class. ONNX has no log1p. Near 1, where it matters, r − 1 is exact, so that ln r is as good."""
        limits = torch.finfo(self.ratio.dtype)
        terms = self.ratio.clamp_min(limits.eps / 2).log() * self.ratio - self.excess
        return mean_of_draws(terms) * self.pmf.clamp_min(limits.tiny)


@dataclass(frozen=True, eq=False)
class Head:
    """The part of the graph that a structure decides: its module, the form of P^g, its basis, and its draws' size."""

    covariance: nn.Module
    form: str
    width: int
    basis: Float[Tensor, "M r"] | None = None


def head(
    covariance: GraphCovariance, dtype: torch.dtype, classes: int, *, identity: bool, kind: OutputKind = CLASSES
) -> Head:
    """What makes P^g of the terms of layers, the last first; `identity` for one layer that returns the logits."""
    if isinstance(covariance, ClassCoefficients):
        return Head(ClassVariance(covariance.coefficients), "diagonal", classes)
    if isinstance(covariance, PairCoefficients):
        return _full(FullCovariance(covariance.pairs), classes, kind)
    variances, bases = covariance.variances, covariance.bases
    rotations = None if bases is None else [(outer.to(dtype), inner.to(dtype)) for outer, inner in bases]
    if not identity:
        return _full(IndependentCovariance(variances, rotations), classes, kind)
    if bases is None or rotations is None:
        return Head(OutputVariance(variances[0], None), "diagonal", classes)
    return Head(OutputVariance(variances[0], rotations[0][1]), "factored", classes, bases[0][0])


def _full(covariance: nn.Module, classes: int, kind: OutputKind) -> Head:
    require_few_classes(classes)
    return Head(covariance, "full", classes - kind.has_gauge)


def require_few_classes(classes: int) -> None:
    if classes > MOST_CLASSES:
        raise ExportError(
            f"With {classes} classes a full covariance of the logits cannot be factorised in an exported graph; "
            f"expected at most {MOST_CLASSES}. Fit the last layer alone (last_layers=1) with fisher='eta', "
            "structure='diag' or structure='kron', whose logits are sampled without a factorisation.",
            arguments={"last_layers": 1, "fisher": "eta", "structure": ("diag", "kron")},
        )
