"""What every structure of the posterior has to do, and what tells them apart.

Each structure is an approximation of the information matrix; everything after that is exact. So one contract holds for
all of them, with the structure's own `dense()` as the truth.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from comparison import assert_close
from data import draw
from errbar._base import linalg
from errbar._base.execution import plain_execution
from errbar._curvature.block import BlockAccumulator, blocks
from errbar._curvature.dense import DenseAccumulator
from errbar._curvature.diagonal import DiagonalAccumulator, safe_precision
from errbar._curvature.fisher import LogitWeights
from errbar._curvature.kronecker import KroneckerAccumulator, KroneckerSum
from errbar._curvature.layout import inspect
from errbar._curvature.task import Task, product_dtype
from errbar._derivative.full import jacobians
from errbar._derivative.layerwise import LayerwiseDerivative, LayerwiseRoute
from errbar._derivative.route import Derivative, Route, differentiate
from errbar._derivative.trace import _derivatives
from errbar._distributions.covariance import DiagonalCovariance, FactoredCovariance, JointCovariance
from errbar._distributions.sampling import SamplingRoot
from errbar._model.batch import Batch, to_batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar._model.selection import select as select_parameters
from networks import mlp, seeded

STRUCTURES = ["dense", "block", "diag", "kron"]
FLOAT64 = torch.float64


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False))


def convolutional() -> nn.Module:
    """Convolutions, one of them strided and padded, with batch norms that have seen data."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Conv2d(3, 4, 2, stride=2, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    for part in model:
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.running_mean, -0.5, 0.5)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return model


class Tokens(nn.Module):
    """A linear layer applied to each token, a layer norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.tokens(x))).mean(1))


class Twice(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


# model, shape of an input, what is selected
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = {
    "last layer": (mlp, (5,), {"last_layers": 1}),
    "two layers": (mlp, (5,), {"last_layers": 2}),
    "weights without biases": (mlp, (5,), {"parameters": ["2.weight", "4.weight"]}),
    "biases without weights": (mlp, (5,), {"parameters": ["2.bias", "4.bias"]}),
    "layers without bias": (without_bias, (5,), {"parameters": "all"}),
    "convolutions with batch norms": (convolutional, (2, 4, 4), {"parameters": "all"}),
    "three tokens": (Tokens, (3, 4), {"parameters": ["tokens", "head"]}),
    "many tokens and a layer norm": (Tokens, (9, 4), {"parameters": "all"}),
    "a layer called twice": (Twice, (4,), {"parameters": "all"}),
}


@dataclass(frozen=True, eq=False)
class Asked:
    """What is differentiated, and how."""

    network: Network
    selection: Selection
    route: Route
    fisher: Any
    dtype: torch.dtype


@dataclass(frozen=True)
class Run:
    """A structure on a model: sums over data, and the derivatives that its posterior takes."""

    structure: str
    task: Asked
    route: LayerwiseRoute | None

    @staticmethod
    def of(
        structure: str,
        model: nn.Module,
        x: Tensor,
        fisher: str = "ggn",
        precision: str | None = None,
        last_layers: int | None = None,
        parameters: Any = None,
    ) -> Run:
        """As `collect` begins, with the first batch; no n × n matrix is made."""
        network, batch = Network(model), to_batch(x)
        with plain_execution(network.device):
            layers = inspect(network, batch).layout.ran
            selection = select_parameters(network, layers, last_layers=last_layers, parameters=parameters)
            dtype = product_dtype(network, precision)
            task = Asked(network, selection, Route.plan(network, selection, batch), fisher, dtype)
            return Run(structure, task, LayerwiseRoute.plan(network, selection, batch) if structure == "kron" else None)

    def total(self, *batches: Tensor) -> Any:
        task, device = self.task, self.task.network.device
        with plain_execution(device):
            if self.route is not None:
                precision = "float64" if task.dtype == torch.float64 else None
                facts = (task.network, task.selection, "kron", task.fisher, self.route.n_classes, precision)
                kron = KroneckerAccumulator(Task(*facts, route=Route((), by_layer=self.route)))  # type: ignore[arg-type]
                for x in batches:
                    kron.add_batch(to_batch(x))
                return kron.finish()
            n = task.selection.n_parameters
            total = {
                "dense": lambda: DenseAccumulator(n, task.fisher, task.dtype, device),
                "block": lambda: BlockAccumulator(task.selection, task.fisher, task.dtype, device),
                "diag": lambda: DiagonalAccumulator(n, task.dtype, device),
            }[self.structure]()
            for x in batches:
                logits, derivative = differentiate(task.network, task.selection, task.route, to_batch(x))
                total.add(LogitWeights(logits, task.fisher), derivative)  # type: ignore[arg-type]
            return total.finish()

    def linearised(self, x: Tensor) -> tuple[Tensor, Derivative | LayerwiseDerivative]:
        task = self.task
        with plain_execution(task.network.device):
            if self.route is None:
                mean, derivative = differentiate(task.network, task.selection, task.route, to_batch(x))
                return mean, derivative.to(task.dtype)
            parts = [self.route.differentiate(task.network, part) for part in self._chunks(x)]
            joined = LayerwiseDerivative.concatenated([derivative for _, derivative in parts])
            return torch.cat([mean for mean, _ in parts]), joined.to(task.dtype)

    def _chunks(self, x: Tensor) -> list[Batch]:
        assert self.route is not None
        return list(self.route.chunks(to_batch(x), x.device))

    def jacobian(self, x: Tensor) -> Tensor:
        with plain_execution(self.task.network.device):
            return jacobians(self.task.network, self.task.selection, to_batch(x)).to(FLOAT64)

    def prior(self) -> Tensor:
        """Another number for each module, as every structure allows it."""
        values = torch.empty(self.task.selection.n_parameters, dtype=FLOAT64)
        for index, block in enumerate(blocks(self.task.selection)):
            values[block.part.positions(values.device)] = 0.5 + 0.3 * index
        return values


def close(ours: Tensor, truth: Tensor, tolerance: float = 1e-9) -> None:
    assert_close(ours, truth, tolerance)


# ------------------------------------------------------------------------------------------------------ the contract


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_sums_over_halves_are_the_sum_over_the_whole(structure: str, case: str) -> None:
    make, shape, select = CASES[case]
    x = draw(8, *shape)
    run = Run.of(structure, seeded(make), x, **select)
    first, second, whole = run.total(x[:3]), run.total(x[3:5], x[5:]), run.total(x)
    close((first + second).dense(), whole.dense(), 1e-12)
    close((whole - second).dense(), first.dense(), 1e-11)
    close((whole * 0.3).dense(), 0.3 * whole.dense(), 1e-14)
    close(((first * 0.3) + (second * 0.3)).dense(), 0.3 * whole.dense(), 1e-12)
    assert whole.device == torch.device("cpu")
    assert whole.to(torch.device("cpu")).dense().equal(whole.dense())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_everything_after_the_information_is_exact(structure: str, case: str) -> None:
    """P = (information + prior)⁻¹, P^g = J P Jᵀ for one input and between two, draws, the determinant."""
    make, shape, select = CASES[case]
    x, frames = draw(8, *shape), draw(3, *shape, seed=2)
    run = Run.of(structure, seeded(make), x, **select)
    total, prior = run.total(x), run.prior()
    factor = total.condition(prior, 1e-12)
    precision = total.dense() + torch.diag(prior)
    P = torch.linalg.inv(precision)
    close(factor.covariance, P)
    assert factor.jitter == 0.0
    assert structure == "dense" or not factor.can_recurse(1)

    J = run.jacobian(frames)
    mean, derivative = run.linearised(frames)
    close(derivative.jacobian(), J, 1e-12)
    gaussian = factor.gaussian(mean, derivative)
    close(gaussian.mean, run.task.network.logits(to_batch(frames)).detach(), 1e-12)
    close(gaussian.covariance, J @ P @ J.mT)
    close(gaussian.variance, (J @ P @ J.mT).diagonal(dim1=1, dim2=2))
    between = torch.einsum("imk,kl,jnl->imjn", J, P, J)
    root = linalg.root_of_sum(factor.joint_halves(derivative, linalg.class_rotation(mean.shape[1], mean.device)))
    assert root.shape[1] <= root.shape[0]
    close(JointCovariance.from_root(root.reshape(*mean.shape, -1), 0.0).values, between)
    if structure in ("kron", "diag"):
        close(factor.joint_covariance(derivative), between)

    # Draws are linear in the normal numbers: those of the unit vectors are the rows of a root of P.
    roots = factor.sample(torch.eye(len(P), dtype=FLOAT64))
    close(roots.T @ roots, P)
    assert factor.log_determinant_of_precision() == pytest.approx(float(torch.logdet(precision)))
    moved = factor.to(torch.device("cpu"))
    close(moved.gaussian(mean, derivative).covariance, gaussian.covariance, 1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["two layers", "convolutions with batch norms"])
def test_what_was_seen_can_be_forgotten_and_what_was_not_is_noticed(structure: str, case: str) -> None:
    make, shape, select = CASES[case]
    x = draw(12, *shape)
    run = Run.of(structure, seeded(make), x, **select)
    whole, part, all_but_one = run.total(x), run.total(x[4:]), run.total(x[7:], x[1:7])
    tolerance = whole.tolerance(FLOAT64)
    assert (whole - part).is_positive_semidefinite(tolerance)
    assert (whole - all_but_one).is_positive_semidefinite(tolerance)
    assert (whole - run.total(x[6:], x[:6])).is_positive_semidefinite(tolerance)
    assert not (whole - run.total(3 * draw(9, *shape, seed=5))).is_positive_semidefinite(tolerance)
    nothing = (whole - run.total(x[6:], x[:6])).condition(run.prior(), 1e-6)
    close(nothing.covariance, torch.diag(1 / run.prior()), 1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("case", ["two layers", "convolutions with batch norms", "three tokens"])
def test_float32_products_stay_near_float64_ones(structure: str, case: str) -> None:
    make, shape, select = CASES[case]
    model, x = seeded(make).float(), draw(40, *shape).float()
    fast, exact = (Run.of(structure, model, x, precision=p, **select) for p in (None, "float64"))
    close(fast.total(x).dense(), exact.total(x).dense(), 1e-5)
    variances = []
    for run in (fast, exact):
        factor = run.total(x).condition(run.prior(), 1e-6)
        variances.append(factor.gaussian(*run.linearised(x[:5])).covariance.to(FLOAT64))
        assert (run.total(x) - run.total(x[20:], x[:20])).is_positive_semidefinite(
            run.total(x).tolerance(run.task.dtype)
        )
    close(variances[0], variances[1], 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_gpu_gives_what_a_cpu_gives(structure: str, case: str) -> None:
    make, shape, select = CASES[case]
    x, frames = draw(8, *shape), draw(3, *shape, seed=2)
    here = Run.of(structure, seeded(make), x, **select)
    there = Run.of(structure, seeded(make).cuda(), x.cuda(), **select)
    total = there.total(x.cuda())
    close(total.dense().cpu(), here.total(x).dense())
    factor = here.total(x).condition(here.prior(), 1e-12)
    for other in (total.condition(here.prior().cuda(), 1e-12), factor.to(torch.device("cuda"))):
        close(other.covariance.cpu(), factor.covariance)
        gaussian = other.gaussian(*there.linearised(frames.cuda()))
        ours = factor.gaussian(*here.linearised(frames))
        close(gaussian.covariance.cpu(), ours.covariance)
        close(gaussian.predict(100).pmf.cpu(), ours.predict(100).pmf, 1e-6)


# ------------------------------------------------------------------------------------- which approximation it is


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_block_and_diag_are_the_exact_matrix_cut_down(case: str, fisher: str) -> None:
    make, shape, select = CASES[case]
    model, x = seeded(make), draw(8, *shape)
    exact = Run.of("dense", model, x, fisher=fisher, **select).total(x).dense()
    inside = torch.zeros_like(exact)
    block = Run.of("block", model, x, fisher=fisher, **select)
    for part in blocks(block.task.selection):
        positions = part.part.positions(exact.device)
        inside[positions[:, None], positions[None, :]] = 1
    close(block.total(x).dense(), exact * inside, 1e-12)
    close(Run.of("diag", model, x, fisher=fisher, **select).total(x).dense(), torch.diag(exact.diagonal()), 1e-12)


def test_a_parametrisation_is_in_the_block_of_its_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))
    model[2].extra = nn.Linear(2, 2)
    selection = Run.of("block", model, torch.ones(2, 4), parameters=["0", "2"]).task.selection
    assert [(block.name, len(block.part)) for block in blocks(selection)] == [("0", 15), ("2", 10), ("2.extra", 6)]


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
@pytest.mark.parametrize("select", [{"last_layers": 1}, {"parameters": "all"}])
def test_kron_is_exact_within_layers_for_one_sample(fisher: str, select: dict[str, Any]) -> None:
    model, x = seeded(mlp), draw(1, 5)
    kron, block = (Run.of(kind, model, x, fisher=fisher, **select).total(x).dense() for kind in ("kron", "block"))
    close(kron, block, 1e-12)


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_kron_is_exact_for_a_softmax_regression_whose_fisher_is_the_same_for_all_samples(fisher: str) -> None:
    model, x = nn.Linear(5, 4).double(), draw(20, 5)
    with torch.no_grad():
        model.weight.zero_()
    kron, dense = (Run.of(kind, model, x, fisher=fisher, last_layers=1).total(x).dense() for kind in ("kron", "dense"))
    close(kron, dense, 1e-12)


def test_kron_counts_every_use_of_a_shared_weight() -> None:
    """(Σ VᵀΛV ⊗ Σ h hᵀ)/(N T), sums over samples and uses, written out for a layer that three tokens go through."""
    model, x = seeded(Tokens), draw(6, 3, 4)
    run = Run.of("kron", model, x, parameters=["tokens"])
    values = model.tokens(x).detach().requires_grad_()
    logits = model.head(model.norm(torch.tanh(values)).mean(1))
    f = torch.softmax(logits.detach(), 1)
    V = torch.stack([torch.autograd.grad(logits[:, m].sum(), values, retain_graph=True)[0] for m in range(5)], 1)
    h = torch.cat([x, torch.ones(6, 3, 1, dtype=FLOAT64)], 2).flatten(0, 1)
    fisher = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    G = torch.einsum("bmti,bmn,bntj->ij", V, fisher, V)
    (block,) = run.total(x).blocks
    close(block.inner, h.T @ h, 1e-12)
    close(block.outer, G, 1e-12)
    assert block.count == 18


def test_layers_that_cannot_be_factored_are_diagonal_and_not_rejected() -> None:
    """Norms, convolutions in groups or over volumes, tied weights, attention."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.volume = nn.Conv3d(1, 2, 2)
            self.groups = nn.Conv2d(2, 4, 1, groups=2)
            self.norm = nn.GroupNorm(2, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight
            self.scaled = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.norm(self.groups(self.volume(x).squeeze(2))).flatten(2).mT
            tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)
            hidden = self.two(torch.tanh(self.one(tokens)))
            return self.head(torch.tanh(self.scaled(hidden) / self.scaled.weight.norm()))

    x = draw(6, 1, 2, 4, 4)
    run = Run.of("kron", seeded(Mixed), x, parameters="all")
    assert run.route is not None
    kept = [(layer.name, layer.weight is None) for layer in run.route.layers]
    # The biases of the tied layers are their own; the weight whose norm is used is not what its layer says.
    assert kept == [("one", True), ("two", True), ("head", False)]
    total = run.total(x)
    positions = run.route.rest_spans.positions(x.device)
    exact = Run.of("diag", seeded(Mixed), x, parameters="all").total(x).values[positions]
    close(total.dense()[positions][:, positions], torch.diag(exact), 1e-12)
    P = torch.linalg.inv(total.dense() + torch.eye(run.task.selection.n_parameters, dtype=FLOAT64))
    factor = total.condition(torch.ones(len(P), dtype=FLOAT64), 1e-12)
    J = run.jacobian(x[:2])
    close(factor.gaussian(*run.linearised(x[:2])).covariance, J @ P @ J.mT)


CONVOLUTIONS = {
    "stride and padding": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 5, 6)),
    "dilation": (lambda: nn.Conv2d(2, 3, 2, dilation=(2, 3), bias=False), (2, 5, 6)),
    "padding to the same size": (lambda: nn.Conv2d(2, 3, (5, 3), padding="same", dilation=(1, 2)), (2, 5, 6)),
    "reflection": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 5, 6)),
    "one dimension": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 9)),
    "one dimension, circular": (lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 9)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions_are_linear_layers_on_patches(case: str) -> None:
    make, shape = CONVOLUTIONS[case]
    model = seeded(lambda: nn.Sequential(make(), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)))
    model(draw(1, *shape))
    x = draw(4, *shape)
    run = Run.of("kron", model, x, parameters="all")
    assert run.route is not None
    assert [layer.name for layer in run.route.layers] == ["0", "3"]
    close(run.linearised(x)[1].jacobian(), run.jacobian(x), 1e-12)


def test_small_parts_of_a_batch_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample and one class at a time, as a large network would need it."""
    make, shape, select = CASES["convolutions with batch norms"]
    x = draw(5, *shape)
    run = Run.of("kron", seeded(make), x, **select)
    total, (_, derivative) = run.total(x), run.linearised(x)
    covariance = total.condition(run.prior(), 1e-12).gaussian(draw(5, 3), derivative).covariance
    monkeypatch.setattr("errbar._derivative.layerwise.part_bytes", lambda kind: 1)
    monkeypatch.setattr("errbar._derivative.layers.JACOBIAN_BYTES", {"cpu": 1})
    assert len(run._chunks(x)) == 5
    parts = run.total(x)
    close(parts.dense(), total.dense(), 1e-12)
    again = parts.condition(run.prior(), 1e-12).gaussian(draw(5, 3), run.linearised(x)[1]).covariance
    close(again, covariance)


def test_no_piece_of_a_mapped_backward_pass_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped over the samples and the classes is as large as both together, not as one of them."""
    make, shape, select = CASES["convolutions with batch norms"]
    x = draw(6, *shape)
    run = Run.of("kron", seeded(make), x, **select)
    assert run.route is not None
    total, (logits, derivative) = run.total(x), run.linearised(x)
    pieces: list[tuple[int, int]] = []

    def noted(values: Tensor, calls: Any, seeds: Tensor, **keywords: Any) -> list[Tensor]:
        pieces.append((len(seeds), len(values)))
        return _derivatives(values, calls, seeds, **keywords)

    classes = logits.shape[1]
    # The widest derivatives of two samples and all classes, in float32.
    monkeypatch.setattr("errbar._derivative.layerwise._MAPPED_PIECE_BYTES", 2 * classes * 4 * run.route.widest)
    monkeypatch.setattr("errbar._derivative.trace._derivatives", noted)
    close(run.total(x).dense(), total.dense(), 1e-12)
    assert {count for count, _ in pieces} == {2 * classes // len(x)}
    pieces.clear()
    parts = list(run.route.derivatives(run.task.network, to_batch(x)))
    assert set(pieces) == {(classes, 2)}
    close(torch.cat([part.jacobian() for _, part in parts]), derivative.jacobian(), 1e-12)


def plain_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 3)
    )


class PlainTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(4, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(x)).mean(1))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "shape"), [(mlp, (5,)), (without_bias, (5,)), (plain_convolutional, (2, 4, 4)), (PlainTokens, (6, 4))]
)
def test_kron_is_the_expand_form_of_an_independent_library(
    curvlinops: types.ModuleType, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model, x = seeded(make), draw(9, *shape)
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        list(model.parameters()),
        [(x[:5], torch.zeros(5, dtype=torch.long)), (x[5:], torch.zeros(4, dtype=torch.long))],
        fisher_type="type-2",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    expected = (operator @ torch.eye(operator.shape[1], dtype=FLOAT64)).detach()
    close(Run.of("kron", model, x, parameters="all").total(x[:4], x[4:]).dense(), expected, 1e-10)


# ----------------------------------------------------------------------------------------------------- many classes


@pytest.fixture
def no_class_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covariance of classes by classes is a failure."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a matrix of classes by classes was made for an input")

    monkeypatch.setattr(DiagonalCovariance, "matrix", forbidden)
    monkeypatch.setattr(FactoredCovariance, "matrix", forbidden)
    monkeypatch.setattr(SamplingRoot, "whole", forbidden)
    monkeypatch.setattr("errbar._derivative.layers.torch.diag_embed", forbidden)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_many_classes_never_make_a_matrix_of_classes_by_classes_for_an_input(
    structure: str, no_class_matrices: None
) -> None:
    model, x = seeded(lambda: nn.Linear(30, 300)).float(), draw(40, 30).float()
    run = Run.of(structure, model, x, last_layers=1)
    factor = run.total(x).condition(torch.full((9300,), 2.0, dtype=FLOAT64), 1e-6)
    gaussian = factor.gaussian(*run.linearised(x[:3])).tempered(1.5).scaled(0.7).rounded()[1:]
    assert gaussian.variance.shape == (2, 300)
    assert (gaussian.contrast_variance > 0).all()
    prediction = gaussian.predict(50)
    assert prediction.pmf.shape == prediction.std.shape == prediction.risk(0.1).shape == (2, 300)
    assert torch.allclose(prediction.pmf.sum(1), torch.ones(2))


@pytest.mark.parametrize("options", [{"structure": "kron"}, {"structure": "diag"}, {"fisher": "eta"}])
def test_many_classes_are_calibrated_without_matrices_of_classes(
    options: dict[str, Any], no_class_matrices: None
) -> None:
    """And give the T and T_c of the same Gaussians in full."""
    model, x = seeded(lambda: nn.Linear(12, 40)), draw(60, 12)
    with torch.no_grad():
        labels = (3 * model(x) + draw(60, 40, seed=5)).argmax(1)
    posterior = errbar.fit(model, [x], last_layers=1, prior=errbar.Prior(2.0), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)  # sixty labels do not determine both
        whole = errbar.calibrate(posterior, [(x, labels)], samples=50)
        parts = errbar.calibrate(posterior, [(x[:7], labels[:7]), (x[7:], labels[7:])], samples=50)
    assert (parts.temperature, parts.covariance_scale) == pytest.approx((whole.temperature, whole.covariance_scale))
    gaussian = posterior.logits(x)
    value = errbar.metrics.nll(gaussian.predict(50).pmf, labels)
    tempered = gaussian.tempered(whole.temperature).scaled(whole.covariance_scale)
    assert errbar.metrics.nll(tempered.predict(50).pmf, labels) < value


def test_the_factored_form_is_the_gaussian_that_it_stands_for() -> None:
    K = 40_000
    mean, basis, weights = draw(4, 3), draw(3, 3, seed=2), draw(4, 3, seed=3).square()
    factored = errbar.LogitGaussian(mean, FactoredCovariance(basis, weights))
    dense = errbar.LogitGaussian(mean, basis @ torch.diag_embed(weights) @ basis.T)
    close(factored.covariance, dense.covariance, 1e-12)
    close(factored.variance, dense.variance, 1e-12)
    close(factored.contrast_variance, dense.contrast_variance, 1e-12)
    close(factored.mean_field_pmf(), dense.mean_field_pmf(), 1e-12)
    for change in (
        lambda g: g.tempered(1.7),
        lambda g: g.scaled(0.4),
        lambda g: g[1:3],
        lambda g: g.rounded(),
        lambda g: g.centered(),
    ):
        ours, truth = change(factored), change(dense)
        assert isinstance(ours.form, FactoredCovariance)
        close(ours.mean, truth.mean, 1e-12)
        close(ours.covariance, truth.covariance, 1e-12)
    joined = errbar.LogitGaussian.concatenated([factored, factored[1:]])
    assert isinstance(joined.form, FactoredCovariance)
    close(joined.covariance[4:], dense.covariance[1:], 1e-12)
    rotation = torch.linalg.qr(draw(3, 3, seed=4))[0]
    for same in (factored.form, FactoredCovariance(basis, weights, rotation)):
        sampling_root, jitter = same.sampling_root(FLOAT64)
        root = sampling_root.whole()
        close(root @ root.mT, dense.centered().covariance, 1e-12)
        close(sampling_root.squares(), root.square().sum((1, 2)), 1e-12)
        assert jitter == 0.0
    ours, truth = factored.predict(K, seed=1), dense.predict(K, seed=2)
    error = 4 * (ours.standard_error.square() + truth.standard_error.square()).sqrt()
    assert ((ours.pmf - truth.pmf).abs() < error).all()
    assert torch.equal(factored.predict(100, seed=3).pmf[1:2], factored[1:2].predict(100, seed=3).pmf)


def test_samples_do_not_depend_on_which_eigenvectors_were_found() -> None:
    """Signs, and rotations where eigenvalues are equal, are the solver's to choose, and differ by machine."""
    Q = torch.linalg.qr(draw(4, 4))[0]
    mean, weights = draw(3, 4, seed=2), draw(3, 4, seed=3).square()
    weights[:, 2:] = weights[:, 2:3]
    turned = Q * torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=FLOAT64)
    turned[:, 2:] = turned[:, 2:] @ torch.linalg.qr(draw(2, 2, seed=4))[0]
    one, other = (errbar.LogitGaussian(mean, FactoredCovariance(basis, weights, basis.T)) for basis in (Q, turned))
    close(one.predict(50).pmf, other.predict(50).pmf, 1e-12)
    close(one.sampling_root().whole(), other.sampling_root().whole(), 1e-12)


def test_a_common_shift_of_great_variance_does_not_blur_the_samples() -> None:
    """Softmax ignores the shift; in float32 its draws must not swallow the contrasts."""
    basis = torch.linalg.qr(torch.cat([torch.ones(4, 1, dtype=FLOAT64), draw(4, 3)], 1))[0]
    mean, weights = draw(2, 4), torch.tensor([[1e10, 1.0, 0.5, 0.1]], dtype=FLOAT64).expand(2, 4)
    form = FactoredCovariance(basis, weights)
    exact = errbar.LogitGaussian(mean, form).predict(200).pmf
    close(errbar.LogitGaussian(mean.float(), form.to(torch.float32)).predict(200).pmf.double(), exact, 1e-5)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_kron_refuses_a_prior_that_differs_within_a_layer() -> None:
    x = draw(4, 5)
    total = Run.of("kron", seeded(mlp), x, last_layers=1).total(x)
    prior = torch.ones(28, dtype=FLOAT64)
    prior[24:] = 2.0
    with pytest.raises(errbar.ArgumentError, match=r"layer '4' ranges from 1 to 2; structure='kron' needs one number"):
        total.condition(prior, 1e-12)


def test_kron_refuses_factors_of_other_layers() -> None:
    x = draw(4, 5)
    one, other, more = (
        Run.of("kron", seeded(mlp), x, parameters=names).total(x) for names in (["4"], ["2"], ["2", "4"])
    )
    with pytest.raises(errbar.MismatchError, match="layers '4' and '2' cannot be combined"):
        one + other
    with pytest.raises(errbar.MismatchError, match="of 1 and of 2 layers cannot be combined"):
        one + more


def test_kron_refuses_factors_that_are_not_finite() -> None:
    x = draw(4, 5)
    total = Run.of("kron", seeded(mlp), x, last_layers=1).total(x)
    assert isinstance(total, KroneckerSum)
    total.blocks[0].inner[0, 0] = torch.nan
    with pytest.raises(errbar.CovarianceError, match="layer '4' hold NaN or infinite values"):
        total.condition(torch.ones(28, dtype=FLOAT64), 1e-12)


def test_a_layer_that_changes_its_ways_is_refused() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if len(x) < 5 else x[:, :3]

    x = draw(6, 4)
    run = Run.of("kron", seeded(Fickle), x[:4], last_layers=1)
    with pytest.raises(errbar.ModelError, match="Layer 'layer' ran with one input for each sample in the first batch"):
        run.total(x)


def test_precisions_that_are_not_positive_need_jitter_or_are_refused() -> None:
    values = torch.tensor([1.0, 1.0, -1e-9], dtype=FLOAT64)
    lifted, jitter = safe_precision(values, limit=1e-6)
    assert jitter == pytest.approx(1e-8)
    assert (lifted > 0).all()
    with pytest.raises(errbar.CovarianceError, match="smallest entry is -1e-09, and adding 1e-12 of the mean"):
        safe_precision(values, limit=1e-12)
    with pytest.raises(errbar.CovarianceError, match="precision is not positive"):
        safe_precision(torch.tensor([1.0, torch.nan], dtype=FLOAT64), limit=1e-6)


def test_matrices_that_cannot_be_held_are_refused_before_they_are_made() -> None:
    model, x = nn.Linear(400, 300), torch.ones(2, 400)
    run = Run.of("kron", model, x, last_layers=1)
    total = run.total(x)
    factor = total.condition(torch.ones(120_300, dtype=FLOAT64), 1e-6)
    diagonal = Run.of("diag", model, x, last_layers=1).total(x)
    for read in (total.dense, lambda: factor.covariance, diagonal.dense):
        with pytest.raises(errbar.SizeError, match=r"120,300 × 120,300 matrix needs 107\.8 GiB"):
            read()
    with pytest.raises(errbar.SizeError, match=r"structure='block' of 120,300 parameters needs [\d.]+ GiB on cpu"):
        errbar.fit(model, [x], last_layers=1, structure="block")


# ------------------------------------------------------------------------------------------- through the front door


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_every_structure_goes_through_fit_predict_fuse_update_and_forget(structure: str) -> None:
    model, x = seeded(convolutional), draw(12, 2, 4, 4)
    data = [(x, torch.arange(12) % 3)]
    posterior = errbar.fit(model, data, parameters="all", structure=structure, rank=200, prior=errbar.Prior(3.0))
    information = posterior.information
    assert information.structure == structure
    P = torch.linalg.inv(information.dense() + 3.0 * torch.eye(information.n_parameters, dtype=FLOAT64))
    close(posterior.covariance(), P, 1e-7)
    network = information.network
    frames = draw(3, 2, 4, 4, seed=5)
    with plain_execution(network.device):
        J = jacobians(network, information.selection, to_batch(frames)).to(FLOAT64)
    close(posterior.logits(frames).covariance, J @ P @ J.mT, 1e-7)
    stacked = J.flatten(0, 1)
    joint = posterior.joint_logits(frames).covariance
    close(joint.reshape(len(stacked), -1), stacked @ P @ stacked.T, 1e-7)
    assert posterior.log_evidence() == pytest.approx(posterior.with_prior(errbar.Prior(3.0)).log_evidence())
    assert posterior.sample_parameters(2)["0.weight"].shape == (2, *model.get_parameter("0.weight").shape)
    twice = posterior.update(data)
    assert twice.information.n_samples == 24
    calibrated = errbar.calibrate(posterior, data, samples=50)
    torch.testing.assert_close(calibrated.predict(frames).pmf.sum(1), torch.ones(3, dtype=FLOAT64))
    if structure == "lowrank":
        with pytest.raises(errbar.ForgetError, match=r"lowrank|sketch"):
            twice.forget(data)
    else:
        close(twice.forget(data).covariance(), P, 1e-6)


def test_an_unknown_structure_is_refused_with_the_known_ones() -> None:
    with pytest.raises(errbar.ArgumentError, match="structure is 'full'; expected 'dense' or 'block'"):
        errbar.fit(seeded(mlp), [draw(4, 5)], last_layers=1, structure="full")
