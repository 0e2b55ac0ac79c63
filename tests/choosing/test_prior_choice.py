"""The prior by evidence and by held-out NLL: the best of the candidates, found without changing anything else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._choosing import choose_prior
from networks import trained

STRUCTURES = ["dense", "block", "kron", "diag", "lowrank"]
CANDIDATES = (0.03, 0.3, 3.0, 30.0, 300.0)


def problem(count: int = 60, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """A small trained network, so that the evidence has its maximum somewhere in the middle."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.7 * torch.randn(count, generator=generator, dtype=torch.float64) > 0).long() + (x[:, 1] > 1).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    trained(model, x, y, steps=60, lr=0.05, weight_decay=0.01)
    return model.eval(), x, y


def collected(structure: str = "dense", **options: Any) -> tuple[errbar.Information, Tensor, Tensor]:
    model, x, y = problem()
    made = errbar.collect(model, [(x, y)], parameters="all", structure=structure, rank=20, **options)
    _, other_x, other_y = problem(seed=1)
    return made, other_x, other_y


def evidence(information: errbar.Information, precision: Tensor, x: Tensor, y: Tensor) -> float:
    """ln p(T) of the Laplace approximation, from the textbook formula and the matrix itself."""
    theta = torch.cat([p.detach().reshape(-1) for p in information.model.parameters()])
    likelihood = -float(nn.functional.cross_entropy(information.model(x).detach(), y, reduction="sum"))
    log_prior = 0.5 * float((precision.log() - precision * theta**2).sum())
    return likelihood + log_prior - 0.5 * float(torch.logdet(information.dense() + torch.diag(precision)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_chooses_the_candidate_with_the_highest(structure: str) -> None:
    information, _, _ = collected(structure)
    _, x, y = problem()
    values = [evidence(information, torch.full((information.n_parameters,), p).double(), x, y) for p in CANDIDATES]
    best = CANDIDATES[max(range(len(values)), key=values.__getitem__)]
    assert best not in (CANDIDATES[0], CANDIDATES[-1])
    assert errbar.choose_prior(information, precisions=CANDIDATES).precision == best


@pytest.mark.parametrize("structure", STRUCTURES)
def test_held_out_nll_chooses_the_candidate_with_the_lowest(structure: str) -> None:
    information, x, y = collected(structure)
    values = []
    for precision in CANDIDATES:
        pmf = errbar.condition(information, errbar.Prior(precision)).predict(x, 200, 3).pmf
        values.append(float(-pmf[torch.arange(len(y)), y].log().mean()))
    best = CANDIDATES[min(range(len(values)), key=values.__getitem__)]
    batches = iter([(x[:25], y[:25]), (x[25:], y[25:])])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        chosen = errbar.choose_prior(information, batches, by="nll", precisions=CANDIDATES, samples=200, seed=3)
    assert chosen.precision == best


@pytest.mark.parametrize("by", ["evidence", "nll"])
@pytest.mark.parametrize("structure", ["dense", "kron"])
def test_a_prior_for_each_layer_cannot_be_improved_by_moving_one(structure: str, by: str) -> None:
    information, x, y = collected(structure)
    data = None if by == "evidence" else [(x, y)]

    def score(precisions: dict[str, float]) -> float:
        posterior = errbar.condition(information, errbar.Prior(precisions))
        if by == "evidence":
            return posterior.log_evidence()
        return -errbar.metrics.nll(posterior.predict(x, 200).pmf, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        options: dict[str, Any] = {"by": by, "precisions": CANDIDATES, "samples": 200}
        common = errbar.choose_prior(information, data, **options).precision
        chosen = errbar.choose_prior(information, data, per_layer=True, **options).precision
    assert isinstance(chosen, dict)
    assert set(chosen) == {"0", "2"}
    assert score(chosen) >= score(dict.fromkeys(chosen, common))
    for layer, value in chosen.items():
        place = CANDIDATES.index(value)
        for other in CANDIDATES[max(0, place - 1) : place + 2]:
            assert score({**chosen, layer: other}) <= score(chosen)


def score_of(by: str, information: errbar.Information, prior: errbar.Prior, x: Tensor, y: Tensor) -> float:
    """What `choose_prior` maximises, in nats."""
    posterior = errbar.condition(information, prior)
    return posterior.log_evidence() if by == "evidence" else -errbar.metrics.nll(posterior.predict(x, 200).pmf, y)


@pytest.mark.parametrize(("by", "tolerance"), [("evidence", 0.05), ("nll", 2e-5)])
@pytest.mark.parametrize("structure", ["dense", "diag"])
def test_a_fine_grid_finds_nothing_better_than_the_default_choice(structure: str, by: str, tolerance: float) -> None:
    information, x, y = collected(structure)
    data = None if by == "evidence" else [(x, y)]
    chosen = errbar.choose_prior(information, data, by=by, samples=200)
    reached = score_of(by, information, chosen, x, y)
    fine = [10 ** (step / 20) for step in range(-40, 81)]
    assert max(score_of(by, information, errbar.Prior(value), x, y) for value in fine) <= reached + tolerance


def test_a_fine_grid_finds_nothing_better_for_any_layer() -> None:
    information, x, y = collected()
    chosen = errbar.choose_prior(information, per_layer=True)
    assert isinstance(chosen.precision, dict)
    reached = score_of("evidence", information, chosen, x, y)
    assert reached >= score_of("evidence", information, errbar.choose_prior(information), x, y)
    for layer, value in chosen.precision.items():
        for step in range(-20, 21):
            moved = errbar.Prior({**chosen.precision, layer: value * 10 ** (step / 20)})
            assert score_of("evidence", information, moved, x, y) <= reached + 0.05


def test_refining_takes_few_factorisations(monkeypatch: pytest.MonkeyPatch) -> None:
    information, _, _ = collected()
    calls = []
    monkeypatch.setattr(choose_prior, "condition", lambda *args: calls.append(args) or errbar.condition(*args))
    errbar.choose_prior(information)
    assert len(choose_prior.PRECISIONS) < len(calls) <= len(choose_prior.PRECISIONS) + 5


def test_labels_whose_probability_underflows_still_tell_priors_apart() -> None:
    """The probability is zero in float32, and in float64 too, for every candidate; its logarithm is not."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(6000 * torch.eye(2) - 3000)
        model.bias.zero_()
    x = torch.eye(2).repeat(10, 1)
    y = torch.tensor([0, 1] * 10)
    y[0] = 1
    with pytest.warns(UserWarning, match="no information at all"):
        information = errbar.collect(model, [x], last_layers=1)
    with pytest.warns(errbar.CalibrationWarning, match=r"edge of the candidates, 0\.01"):
        chosen = errbar.choose_prior(information, [(x, y)], by="nll", samples=50)
    assert chosen.precision == pytest.approx(0.01)


def test_each_layer_is_called_as_priors_call_it() -> None:
    """Parametrised modules, and parameters of the model itself."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3).double())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * self.scale

    _, x, y = problem()
    information = errbar.collect(Odd(), [(x, y)], parameters="all")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        chosen = errbar.choose_prior(information, per_layer=True, precisions=CANDIDATES)
    assert isinstance(chosen.precision, dict)
    assert set(chosen.precision) == {"scale", "head"}
    errbar.condition(information, chosen)


def test_nothing_else_changes() -> None:
    information, _, _ = collected()
    before, weights = information.dense(), [p.clone() for p in information.model.parameters()]
    errbar.choose_prior(information, precisions=CANDIDATES)
    assert torch.equal(information.dense(), before)
    assert all(torch.equal(a, b) for a, b in zip(information.model.parameters(), weights, strict=True))


def test_a_choice_at_the_edge_is_announced() -> None:
    information, _, _ = collected()
    with pytest.warns(errbar.CalibrationWarning, match="edge of the candidates, 3000"):
        errbar.choose_prior(information, precisions=(3000.0, 10_000.0, 30_000.0))


def test_a_precision_that_rounding_drowns_is_no_candidate() -> None:
    """Float32 products leave eigenvalues below zero that 1e-12 does not lift."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(60, 20), nn.ReLU(), nn.Linear(20, 10))
    x = 30 * torch.randn(400, 60, generator=torch.Generator().manual_seed(0))
    information = errbar.collect(model, [(x, torch.zeros(400).long())], last_layers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        assert errbar.choose_prior(information, precisions=(1e-12, 1e-11, 1.0)).precision == 1.0
        with pytest.raises(errbar.CovarianceError, match="No prior precision from 1e-13 to 1e-12"):
            errbar.choose_prior(information, precisions=(1e-13, 1e-12))


def test_questions_that_make_no_sense_are_refused() -> None:
    information, x, y = collected()
    with pytest.raises(errbar.ArgumentError, match="by is 'aic'; expected 'evidence' or 'nll'"):
        errbar.choose_prior(information, by="aic")
    with pytest.raises(errbar.ArgumentError, match="evidence is that of the training data"):
        errbar.choose_prior(information, [(x, y)])
    with pytest.raises(errbar.DataError, match="needs held-out data with labels"):
        errbar.choose_prior(information, by="nll")
    with pytest.raises(errbar.LabelError, match="labels"):
        errbar.choose_prior(information, [x], by="nll")
    with pytest.raises(errbar.ArgumentError, match="precisions is empty"):
        errbar.choose_prior(information, precisions=())
    with pytest.raises(errbar.ArgumentError, match="-1"):
        errbar.choose_prior(information, precisions=(-1.0, 1.0))
    with pytest.raises(errbar.ArgumentError, match="Expected Information"):
        errbar.choose_prior(errbar.condition(information, errbar.Prior()))  # type: ignore[arg-type]
    unlabelled = errbar.collect(information.model, [x], parameters="all")
    with pytest.raises(errbar.LabelError, match="log_evidence needs"):
        errbar.choose_prior(unlabelled)
