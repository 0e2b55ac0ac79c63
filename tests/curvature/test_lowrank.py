"""The low-rank structure: its sketch keeps its guarantee, and its posterior is exact in what the sketch says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import errbar
from data import draw
from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._curvature import lowrank
from errbar._curvature.fisher import LogitWeights, fisher_matrix
from errbar._curvature.lowrank import LowRankAccumulator, LowRankFactor, LowRankSum
from errbar._curvature.sketch import FrequentDirections, shrunk_directions, without_rounding
from errbar._derivative.route import Derivative
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ArgumentError, CovarianceError, ForgetError, ModelError, SizeError
from networks import one_logit, seeded

CPU = torch.device("cpu")


def spread_rows(count: int, n: int, *, decay: float, seed: int = 0) -> Tensor:
    """Rows whose directions fade like i^−decay: steep like the information of a trained network, or flat."""
    directions = draw(n, n, seed=seed + 100) / n**0.5
    return draw(count, n, seed=seed) * torch.arange(1, n + 1, dtype=torch.float64) ** -decay @ directions


def sketched(rows: Tensor, rank: int, *, at_a_time: int = 7) -> LowRankSum:
    sketch = FrequentDirections(rows.shape[1], rank, rows.dtype, CPU)
    for part in rows.split(at_a_time):
        sketch.add(part)
    return LowRankSum(sketch.finish(), sketch.diagonal, sketch.bound, rank)


def lost(total: LowRankSum, rows: Tensor) -> Tensor:
    """The eigenvalues of F − SᵀS."""
    kept = total.rows.double()
    return torch.linalg.eigvalsh(rows.double().T @ rows.double() - kept.T @ kept)


def assert_within_bound(total: LowRankSum, rows: Tensor) -> None:
    """0 ⪯ F − SᵀS ⪯ Δ, −Δ ⪯ F − F̂ ⪯ Δ, and diagonal and trace are those of F."""
    information = rows.T @ rows
    rounding = 1e-12 * float(torch.trace(information))
    eigenvalues = lost(total, rows)
    assert float(eigenvalues[0]) >= -rounding
    assert float(eigenvalues[-1]) <= total.bound + rounding
    assert float(torch.linalg.eigvalsh(information - total.dense()).abs().max()) <= total.bound + rounding
    torch.testing.assert_close(total.dense().diagonal(), information.diagonal())
    torch.testing.assert_close(total.diagonal, information.diagonal())
    assert total.mass == pytest.approx(float(torch.trace(information)), rel=1e-12)
    assert total.discarded_mass == pytest.approx(float(eigenvalues.sum()), abs=rounding)


# ---------------------------------------------------------------------------------------------------- the sketch


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
@pytest.mark.parametrize(("rank", "at_a_time"), [(1, 1), (6, 5), (20, 64), (39, 200)])
def test_what_is_discarded_is_within_its_bound(decay: float, rank: int, at_a_time: int) -> None:
    for seed in range(3):
        rows = spread_rows(200, 40, decay=decay, seed=seed)
        total = sketched(rows, rank, at_a_time=at_a_time)
        assert total.rows.shape[0] <= rank
        assert total.bound > 0
        assert_within_bound(total, rows)


@pytest.mark.parametrize("decay", [0.0, 0.5, 2.0])
def test_the_bound_is_at_most_a_share_of_the_tail(decay: float) -> None:
    rank = 20
    shrunk = shrunk_directions(rank)
    for seed in range(3):
        rows = spread_rows(300, 40, decay=decay, seed=seed)
        eigenvalues = torch.linalg.eigvalsh(rows.T @ rows).flip(0)
        total = sketched(rows, rank)
        for j in range(shrunk + 1):
            assert total.bound <= float(eigenvalues[j:].sum()) / (shrunk + 1 - j) * 1.05 * (1 + 1e-12)


def test_a_stream_made_to_defeat_truncation_keeps_the_bound() -> None:
    """k strong directions and then, one row at a time, a weaker one that in the end has the most: it must be seen."""
    rank = 10
    strong, late = 2 * torch.eye(40, dtype=torch.float64)[:rank], torch.eye(40, dtype=torch.float64)[39:]
    rows = torch.cat([strong, late.expand(400, 40)])
    total = sketched(rows, rank, at_a_time=1)
    assert_within_bound(total, rows)
    assert float(total.rows[:, 39].square().sum()) > 300


def test_the_order_of_the_data_never_breaks_the_bound() -> None:
    rows = spread_rows(150, 30, decay=1.0)
    length = rows.square().sum(1)
    for order in (length.argsort(), length.argsort(descending=True), torch.randperm(150, generator=torch.Generator())):
        assert_within_bound(sketched(rows[order], 8), rows)


def test_light_rows_are_left_out_only_within_the_bound() -> None:
    rows = spread_rows(400, 40, decay=0.5)
    rows[100:] *= torch.logspace(0, -8, 300, dtype=torch.float64)[:, None]
    total = sketched(rows, 8, at_a_time=50)
    assert_within_bound(total, rows)
    light = float(rows.square().sum(1).sort().values[:200].sum())
    assert total.bound > light  # there was room for them
    sketch = FrequentDirections(40, 8, torch.float64, CPU)
    sketch.add(rows[:100])
    before = sketch.bound
    sketch.add(rows[200:])
    assert before < sketch.bound <= 1.05 * before


def test_all_is_kept_while_there_is_room() -> None:
    basis = draw(8, 50, seed=3)
    rows = draw(90, 8, seed=4) @ basis
    total = sketched(rows, 8)
    torch.testing.assert_close(total.dense(), rows.T @ rows, rtol=1e-10, atol=1e-10)
    assert total.bound <= 1e-11 * total.mass
    assert total.discarded_mass <= 1e-11 * total.mass
    short = sketched(rows[:5], 8)
    assert torch.equal(short.rows, rows[:5])
    assert short.bound == 0


def test_sums_carry_their_bounds() -> None:
    rows = spread_rows(300, 40, decay=0.7)
    parts = [sketched(part, 12) for part in rows.split(100)]
    total = parts[0] + parts[1] + parts[2]
    assert total.bound >= sum(part.bound for part in parts)
    assert len(total.rows) <= 12
    assert_within_bound(total, rows)
    other_rank = sketched(rows[:100], 5) + parts[1]
    assert other_rank.rank == 12
    assert_within_bound(other_rank, rows[:200])


def test_discounted_information_is_that_of_fewer_data() -> None:
    rows = spread_rows(100, 20, decay=0.5)
    total = sketched(rows, 6)
    torch.testing.assert_close((total * 0.25).dense(), 0.25 * total.dense())
    assert_within_bound(total * 0.25, 0.5 * rows)
    assert (total * 0.0).bound == 0
    assert torch.equal((total * 0.0).dense(), torch.zeros(20, 20, dtype=torch.float64))


def test_a_sketch_cannot_forget() -> None:
    total = sketched(spread_rows(30, 10, decay=0.5), 3)
    with pytest.raises(ForgetError, match="cannot forget: what was discarded"):
        total - total


def test_the_diagonal_that_is_put_back_is_better_than_nothing_and_than_the_bound() -> None:
    rows = spread_rows(400, 60, decay=0.6)
    information = rows.T @ rows
    total = sketched(rows, 12)
    kept = total.rows.T @ total.rows
    identity = torch.eye(60, dtype=torch.float64)

    def error(estimate: Tensor) -> float:
        return float((information - estimate).norm())

    chosen = error(total.dense())
    assert chosen < error(kept + total.discarded_mass / 60 * identity)
    assert chosen < error(kept)
    assert chosen < error(kept + total.bound / 2 * identity)
    assert chosen < error(kept + total.bound * identity)


def test_rows_of_float32_keep_the_bound_to_their_rounding() -> None:
    rows = spread_rows(200, 40, decay=1.0)
    total = sketched(rows.float(), 10)
    assert total.rows.dtype == torch.float32
    eigenvalues = lost(total, rows)
    assert float(eigenvalues[0]) >= -1e-6 * total.mass
    assert float(eigenvalues[-1]) <= total.bound + 1e-6 * total.mass
    assert total.bound == pytest.approx(sketched(rows, 10).bound, rel=1e-4)


# ------------------------------------------------------------------------------------------------- the posterior


def jacobian_of(rows: Tensor) -> Derivative:
    return Derivative(rows.shape[2], rows.shape[1], None, rows)


@pytest.fixture
def factor_and_covariance() -> tuple[LowRankFactor, Tensor]:
    """A factor, and the inverse that it stands for; the prior differs between parameters."""
    total = sketched(spread_rows(100, 30, decay=0.5), 9)
    prior = torch.linspace(0.5, 20, 30, dtype=torch.float64)
    return total.condition(prior, 0.0), torch.linalg.inv(total.dense() + torch.diag(prior))


def test_the_covariance_inverts_information_plus_prior(factor_and_covariance: tuple[LowRankFactor, Tensor]) -> None:
    factor, covariance = factor_and_covariance
    torch.testing.assert_close(factor.covariance, covariance, rtol=1e-10, atol=1e-14)
    assert factor.log_determinant_of_precision() == pytest.approx(-float(torch.logdet(covariance)), rel=1e-12)
    assert factor.jitter == 0
    assert not factor.can_recurse(1)


def test_logits_have_the_covariance_of_the_delta_method(factor_and_covariance: tuple[LowRankFactor, Tensor]) -> None:
    factor, covariance = factor_and_covariance
    jacobian, mean = draw(5, 4, 30, seed=7), draw(5, 4, seed=8)
    gaussian = factor.gaussian(mean, jacobian_of(jacobian))
    torch.testing.assert_close(gaussian.covariance, jacobian @ covariance @ jacobian.mT, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gaussian.mean, mean)
    identity = torch.eye(4, dtype=torch.float64)
    joint = sum(half @ half.T for half in factor.joint_halves(jacobian_of(jacobian), identity))
    stacked = jacobian.reshape(20, 30)
    torch.testing.assert_close(joint, stacked @ covariance @ stacked.T, rtol=1e-10, atol=1e-12)


def test_draws_have_the_covariance_of_the_posterior(factor_and_covariance: tuple[LowRankFactor, Tensor]) -> None:
    """The draws are linear in z: those of the unit vectors are the rows of A, and AᵀA is their covariance."""
    factor, covariance = factor_and_covariance
    drawn = factor.sample(torch.eye(30, dtype=torch.float64))
    torch.testing.assert_close(drawn.T @ drawn, covariance, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_priors_and_huge_information_stay_accurate_and_positive(dtype: torch.dtype) -> None:
    """Strengths from 10² to 10¹⁴: J D⁻¹ Jᵀ − T diag(s/(1 + s)) Tᵀ would have no correct digit left."""
    n, prior = 200, 1e-6
    orthonormal = torch.linalg.qr(draw(n, n)).Q.T
    information = torch.logspace(8, -4, 13, dtype=torch.float64)
    rows = (orthonormal[:13] * information.sqrt()[:, None]).to(dtype)
    total = LowRankSum(rows, rows.double().square().sum(0), 0.0, 13)
    factor = total.condition(torch.full((n,), prior, dtype=torch.float64), 0.0)
    inside = draw(1, 3, 13) @ orthonormal[:13]
    truth = (inside @ orthonormal[:13].T / (information + prior)) @ (inside @ orthonormal[:13].T).mT
    found = factor.gaussian(draw(1, 3), jacobian_of(inside)).covariance
    assert float(torch.linalg.eigvalsh(found).min()) > 0
    # Rounding of the stored rows tilts them by 6e-8; where the variance is 10⁶ beside, that tilt is what remains.
    torch.testing.assert_close(found, truth, rtol=1e-8 if dtype == torch.float64 else 1e-3, atol=0.0)
    outside = factor.gaussian(draw(1, 3), jacobian_of(draw(1, 3, n, seed=5))).covariance
    assert float(torch.linalg.eigvalsh(outside).min()) > 0
    assert float(torch.linalg.eigvalsh(factor.covariance).min()) >= -1e-16 / prior
    expected = float((information + prior).log().sum()) + (n - 13) * torch.tensor(prior).log().item()
    assert factor.log_determinant_of_precision() == pytest.approx(expected, rel=1e-6)


def test_without_information_the_posterior_is_the_prior() -> None:
    total = LowRankSum(torch.zeros(2, 6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64), 0.0, 4)
    prior = torch.arange(1.0, 7.0, dtype=torch.float64)
    factor = total.condition(prior, 0.0)
    torch.testing.assert_close(factor.covariance, torch.diag(1 / prior))
    torch.testing.assert_close((total + total).condition(prior, 0.0).covariance, torch.diag(1 / prior))


# --------------------------------------------------------------------------------------------------- the network


class Recurrent(nn.Module):
    """A recurrent layer, a normalisation and tied weights: nothing that a linear layer's formula covers."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(3, 4, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.tied = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.recurrent(x)[0][:, -1])
        return self.tied(torch.tanh(self.tied(hidden)))


class Branching(nn.Module):
    """Control flow by data: no batching rule exists for it, so samples are differentiated one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.one(row) if float(row.sum()) > 0 else self.other(torch.tanh(row)) for row in x]
        return torch.stack(rows)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 4)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutional": (convolutional, (1, 6, 6)),
    "recurrent": (Recurrent, (5, 3)),
    "branching": (Branching, (3,)),
    "one logit": (one_logit, (5,)),
}


def everything(model: nn.Module) -> tuple[Network, Selection]:
    parameters = dict(model.named_parameters())
    return Network(model), Selection(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))


def collected(model: nn.Module, data: Sequence[Tensor], rank: int, fisher: str = "ggn") -> LowRankSum:
    network, selection = everything(model)
    total = LowRankAccumulator(network, selection, fisher, network.dtype, CPU, rank)  # type: ignore[arg-type]
    with plain_execution(CPU):
        for x in data:
            logits = total.add_batch(network.prepare(Batch((x,)), Checks(CPU)))
            torch.testing.assert_close(logits, network.logits(Batch((x,))))
        return total.finish()


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_thin_root_is_a_root(fisher: str) -> None:
    logits = torch.cat([3 * draw(20, 5), torch.tensor([[0.0, 40, 0, 0, 0], [40.0, 0, 0, 0, 0], [0, 0, 0, 0, 800]])])
    root = LogitWeights(logits, fisher).thin_root()  # type: ignore[arg-type]
    assert root.shape[2] == (4 if fisher == "ggn" else 5)
    torch.testing.assert_close(root @ root.mT, fisher_matrix(logits, fisher), rtol=1e-9, atol=1e-16)  # type: ignore[arg-type]


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
@pytest.mark.parametrize("case", CASES)
def test_with_enough_rank_it_is_the_exact_structure(case: str, fisher: str) -> None:
    make, shape = CASES[case]
    model = seeded(make)
    data = [draw(7, *shape, seed=1), draw(4, *shape, seed=2)]
    exact = errbar.fit(model, data, parameters="all", fisher=fisher, prior=errbar.Prior(0.1))
    n = exact.information.n_parameters
    total = collected(model, data, 1000, fisher)
    torch.testing.assert_close(total.dense(), exact.information.dense(), rtol=1e-8, atol=1e-10)
    assert total.bound <= 1e-11 * total.mass
    factor = total.condition(torch.full((n,), 0.1, dtype=torch.float64), 0.0)
    assert factor.log_determinant_of_precision() == pytest.approx(exact.factor.log_determinant_of_precision())
    network, selection = everything(model)
    x = draw(5, *shape, seed=3)
    with plain_execution(CPU):
        gaussian = factor.gaussian_of_batch(network, selection, Batch((x,)))
    torch.testing.assert_close(gaussian.mean, exact.logits(x).mean)
    torch.testing.assert_close(gaussian.covariance, exact.logits(x).covariance, rtol=1e-8, atol=1e-10)


def test_a_small_rank_keeps_its_bound_on_a_network() -> None:
    model = seeded(convolutional)
    data = [draw(9, 1, 6, 6, seed=seed) for seed in range(5)]
    exact = errbar.collect(model, data, parameters="all").dense()
    total = collected(model, data, 12)
    kept = total.rows.T @ total.rows
    eigenvalues = torch.linalg.eigvalsh(exact - kept)
    assert float(eigenvalues[0]) >= -1e-10
    assert float(eigenvalues[-1]) <= total.bound * (1 + 1e-10)
    assert total.mass == pytest.approx(float(torch.trace(exact)), rel=1e-10)
    assert 0 < total.discarded_mass < 0.5 * total.mass


@pytest.mark.parametrize("row_bytes", [1, 8 * 319 * 2, 8 * 319 * 7])
def test_rows_made_a_few_at_a_time_are_the_same(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(convolutional)
    data = [draw(9, 1, 6, 6)]
    whole = collected(model, data, 1000)
    monkeypatch.setattr(lowrank, "ROW_BYTES", {"cpu": row_bytes})
    torch.testing.assert_close(collected(model, data, 1000).dense(), whole.dense())
    monkeypatch.setattr(lowrank, "ROWS", {"cpu": 1})
    torch.testing.assert_close(collected(model, data, 1000).dense(), whole.dense())


@pytest.mark.parametrize("case", ["convolutional", "branching"])
def test_one_class_after_the_other_gives_the_same_covariance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = CASES[case]
    model = seeded(make)
    total = collected(model, [draw(9, *shape)], 8)
    factor = total.condition(torch.full((total.rows.shape[1],), 1e-3, dtype=torch.float64), 0.0)
    network, selection = everything(model)
    batch = Batch((draw(3, *shape, seed=3),))
    with plain_execution(CPU):
        expected = factor.gaussian_of_batch(network, selection, batch).covariance
        monkeypatch.setattr(lowrank, "ROW_BYTES", {"cpu": 1})
        torch.testing.assert_close(factor.gaussian_of_batch(network, selection, batch).covariance, expected)
        monkeypatch.setattr(lowrank, "JACOBIAN_BYTES", 1)
        torch.testing.assert_close(factor.gaussian_of_batch(network, selection, batch).covariance, expected)


def test_float32_networks_have_float32_rows_and_nearly_the_same_result() -> None:
    model = seeded(convolutional)
    data = [draw(9, 1, 6, 6, seed=seed) for seed in range(5)]
    accurate = collected(model, data, 12)
    total = collected(model.float(), [x.float() for x in data], 12)
    assert total.rows.dtype == torch.float32
    assert total.bound == pytest.approx(accurate.bound, rel=1e-3)
    torch.testing.assert_close(total.diagonal, accurate.diagonal, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [0, -1, 2.5, True])
def test_ranks_that_are_no_number_of_rows_are_refused(rank: int) -> None:
    network, selection = everything(seeded(one_logit))
    with pytest.raises(ArgumentError, match=r"rank is .*; expected a whole number of one or more"):
        LowRankAccumulator(network, selection, "ggn", torch.float64, CPU, rank)


def test_what_does_not_fit_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("errbar._base.memory.available_bytes", lambda device: 10**6)
    monkeypatch.setattr("errbar._planning.choice.available_bytes", lambda device: 10**6)
    model = torch.nn.Linear(100, 10)
    with pytest.raises(SizeError, match=r"structure='lowrank' of 1,010 parameters needs .* MiB on cpu"):
        errbar.fit(model, [torch.zeros(2, 100)], last_layers=1, structure="lowrank")


def test_logits_and_derivatives_that_are_not_finite_are_reported() -> None:
    model = seeded(one_logit)
    network, selection = everything(model)
    total = LowRankAccumulator(network, selection, "ggn", torch.float64, CPU, 2)
    with plain_execution(CPU):
        total.add_batch(Batch((torch.full((2, 5), torch.inf, dtype=torch.float64),)))
    with pytest.raises(ModelError, match="NaN or infinite logits"):
        total.finish()
    with pytest.raises(CovarianceError, match="Products of the derivatives of the logits hold NaN or infinite"):
        sketched(torch.full((5, 4), torch.nan, dtype=torch.float64), 2)


def test_a_covariance_that_is_none_is_an_error_and_rounding_is_not() -> None:
    slightly, badly = torch.diag(torch.tensor([1.0, -1e-9])).double(), torch.diag(torch.tensor([1.0, -1e-3])).double()
    assert float(torch.linalg.eigvalsh(without_rounding(slightly, 1e-8))[0]) >= 0
    with pytest.raises(CovarianceError, match=r"has the eigenvalue -0.001, where rounding explains −1e-08"):
        without_rounding(badly, 1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_gives_what_the_processor_gives() -> None:
    model = seeded(convolutional)
    data = [draw(9, 1, 6, 6, seed=seed) for seed in range(3)]
    expected = collected(model, data, 1000)
    device = torch.device("cuda")
    network, selection = everything(model.to(device))
    total = LowRankAccumulator(network, selection, "ggn", torch.float64, device, 1000)
    with plain_execution(device):
        for x in data:
            total.add_batch(network.prepare(Batch((x,)), Checks(device)))
        found = total.finish()
    torch.testing.assert_close(found.dense().cpu(), expected.dense())
    prior = torch.full((found.rows.shape[1],), 0.1, dtype=torch.float64)
    covariance = found.condition(prior.to(device), 0.0).covariance.cpu()
    torch.testing.assert_close(covariance, expected.condition(prior, 0.0).covariance)
    torch.testing.assert_close(expected.to(device).condition(prior.to(device), 0.0).covariance.cpu(), covariance)
