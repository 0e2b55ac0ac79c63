"""A structure that is defined here, and registered by one call, does all that the others do.

Its information is one multiple of the identity, c I with c = Σ_n tr(J_nᵀ Λ_n J_n)/n, so P = I/(c + λ) in closed form.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import errbar
from errbar._base.container import Contents
from errbar._curvature import registry
from errbar._curvature.fisher import Weights
from errbar._curvature.structure import Refactorised, Structure, Summand
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload
from errbar._distributed.team import Team
from errbar._distributions.covariance import FullCovariance
from errbar._distributions.logits import LogitGaussian
from processes import torchrun

LAMBDA = 3.0


@dataclass(frozen=True, eq=False)
class MultipleSum:
    """c, as a tensor of one number, and the number of parameters."""

    c: Float[Tensor, "1"]
    n: int

    @property
    def device(self) -> torch.device:
        return self.c.device

    def dense(self) -> Float[Tensor, "n n"]:
        return self.c * torch.eye(self.n, dtype=torch.float64)

    def __add__(self, other: MultipleSum) -> MultipleSum:
        return MultipleSum(self.c + other.c, self.n)

    def __sub__(self, other: MultipleSum) -> MultipleSum:
        return MultipleSum(self.c - other.c, self.n)

    def __mul__(self, factor: float) -> MultipleSum:
        return MultipleSum(self.c * factor, self.n)

    def to(self, device: torch.device) -> MultipleSum:
        return MultipleSum(self.c.to(device), self.n)

    def tolerance(self, dtype: torch.dtype) -> float:
        return 100 * torch.finfo(dtype).eps * float(self.c)

    def is_positive_semidefinite(self, tolerance: float) -> bool:
        return float(self.c) >= -tolerance

    def is_zero(self) -> bool:
        return float(self.c) == 0

    def condition(self, prior_precision: Float[Tensor, "n"], limit: float) -> MultipleFactor:
        return MultipleFactor(self.c + prior_precision[:1], self.n)

    def reduced(self, has_data: Sequence[bool], team: Team) -> MultipleSum:
        return MultipleSum(team.summed(self.c), self.n)

    def written(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {"form": "multiple"}, {"sum": self.c}


class MultipleFactor(Refactorised):
    """P = I/(c + λ)."""

    jitter = 0.0

    def __init__(self, precision: Float[Tensor, "1"], n: int) -> None:
        self.precision, self.n = precision, n

    @property
    def covariance(self) -> Float[Tensor, "n n"]:
        return torch.eye(self.n, dtype=torch.float64) / self.precision

    def gaussian(self, mean: Float[Tensor, "B M"], derivative: Any) -> LogitGaussian:
        jacobian = derivative.jacobian()
        return LogitGaussian(mean, FullCovariance(jacobian @ jacobian.mT / self.precision.to(jacobian.dtype)))

    def joint_halves(self, derivative: Any, rotation: Float[Tensor, "M M"]) -> Iterator[Float[Tensor, "CM n"]]:
        yield derivative.of_rotated(rotation).jacobian().flatten(0, 1) * self.precision.rsqrt()

    def sample(self, normal: Float[Tensor, "K n"]) -> Float[Tensor, "K n"]:
        return normal * self.precision.rsqrt()

    def log_determinant_of_precision(self) -> float:
        return self.n * float(self.precision.log())

    def to(self, device: torch.device) -> MultipleFactor:
        return MultipleFactor(self.precision.to(device), self.n)

    def written(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return {}, {"factor.precision": self.precision}


class MultipleAccumulator:
    def __init__(self, task: Task) -> None:
        self.task, self.c = task, torch.zeros(1, dtype=torch.float64)

    def add(self, weights: Weights, derivative: Any) -> None:
        squares = weights.squares(derivative.jacobian().to(self.task.dtype))
        self.c += squares.sum().double() / squares.shape[1]

    def finish(self) -> MultipleSum:
        return MultipleSum(self.c, self.task.selection.n_parameters)


class MultipleStructure(Structure):
    name = "multiple"

    def cost(self, work: Workload) -> Cost:
        return Cost(16, 16, 16, float(work.n), 1.0, float(work.n), (1.0, 1.0), exact=False)

    def sums(self, task: Task) -> Summand:
        return MultipleAccumulator(task)

    def read_sum(self, contents: Contents, task: Task) -> MultipleSum:
        contents.description.part("sum").choice("form", ("multiple",))
        return MultipleSum(contents.tensor("sum", 1), task.selection.n_parameters)

    def read_factor(
        self, contents: Contents, total: Any, prior_precision: Float[Tensor, "n"], limit: float
    ) -> MultipleFactor:
        return MultipleFactor(contents.tensor("factor.precision", 1), total.n)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model, torch.randn(30, 4, generator=generator, dtype=torch.float64), torch.arange(30) % 3


def fitted(model: nn.Module, data: Any) -> errbar.Posterior:
    return errbar.fit(model, data, parameters="all", structure="multiple", prior=errbar.Prior(LAMBDA))


def closed_form(model: nn.Module, x: Tensor) -> float:
    """c by an exact fit, whose trace it shares."""
    exact = errbar.collect(model, [x], parameters="all", group=False).dense()
    return float(exact.trace()) / len(exact)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_STRUCTURES", dict(registry._STRUCTURES))
    registry.register(MultipleStructure())


def test_it_fits_predicts_and_equals_the_closed_form() -> None:
    model, x, y = problem()
    posterior = fitted(model, [(x[:20], y[:20]), (x[20:], y[20:])])
    c, n = closed_form(model, x), posterior.information.n_parameters
    expected = torch.eye(n, dtype=torch.float64) / (c + LAMBDA)
    torch.testing.assert_close(posterior.covariance(), expected, rtol=1e-10, atol=0)
    gaussian, prediction = posterior.logits(x[:4]), posterior.predict(x[:4])
    assert gaussian.covariance.shape == (4, 3, 3)
    torch.testing.assert_close(prediction.pmf.sum(1), torch.ones(4, dtype=torch.float64))
    joint = errbar.fuse_frames(posterior.joint_logits(x[:3]))
    assert bool(torch.isfinite(joint.mean).all())
    assert posterior.log_evidence() < 0
    assert errbar.calibrate(posterior, [(x, y)]).temperature > 0


def test_it_adds_forgets_and_discounts() -> None:
    model, x, _ = problem()
    first, second = (errbar.collect(model, [part], parameters="all", structure="multiple") for part in (x[:12], x[12:]))
    whole = (first + second).dense()
    torch.testing.assert_close(whole[0, 0], torch.tensor(closed_form(model, x)).double(), rtol=1e-6, atol=0)
    torch.testing.assert_close((first + second - second).dense(), first.dense(), rtol=1e-10, atol=0)
    torch.testing.assert_close((first * 0.5).dense(), first.dense() / 2)
    posterior = fitted(model, [x[:12]])
    torch.testing.assert_close(posterior.update([x[12:]]).covariance(), fitted(model, [x]).covariance())
    with pytest.raises(errbar.ForgetError, match="negative information"):
        posterior.forget([10 * x[:12]])


@pytest.mark.parametrize("factors", [False, True])
def test_it_is_saved_and_loaded(tmp_path: Path, factors: bool) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x])
    posterior.save(tmp_path / "it.safetensors", factors=factors)
    loaded = errbar.load(tmp_path / "it.safetensors", model)
    assert torch.equal(loaded.predict(x).pmf, posterior.predict(x).pmf)
    assert errbar.info(tmp_path / "it.safetensors").structure == "multiple"


def test_it_is_planned() -> None:
    model, x, _ = problem()
    options = [option for option in errbar.plan(model, x).options if option.structure == "multiple"]
    assert options
    assert all(option.posterior_bytes == 16 for option in options)


def test_it_is_reduced_over_two_ranks(tmp_path: Path) -> None:
    run = torchrun(2, __file__, str(tmp_path))
    assert run.returncode == 0, run.stderr[-4000:]
    model, x, _ = problem()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        torch.testing.assert_close(found, fitted(model, [x]).covariance(), rtol=1e-10, atol=0)


if __name__ == "__main__":
    registry.register(MultipleStructure())
    torch.distributed.init_process_group("gloo")
    model, x, _ = problem()
    rank = torch.distributed.get_rank()
    posterior = fitted(model, iter([x[:13]] if rank == 0 else [x[13:]]))
    torch.save(posterior.covariance(), Path(sys.argv[1]) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
