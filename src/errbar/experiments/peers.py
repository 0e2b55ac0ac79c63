"""laplace-torch in the same comparison, through its own interface. Used if it is installed, never required."""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from errbar.experiments.methods import Method, Outcome
from errbar.experiments.problem import Problem, Samples


def available() -> bool:
    return importlib.util.find_spec("laplace") is not None


def laplace_methods(network: nn.Module, problem: Problem, seconds: float) -> Iterator[tuple[str, Method]]:
    """Its defaults (last layer, Kronecker, prior by marginal likelihood, probit), and its last layer at its best:
    the full covariance, the prior by a grid search on the validation data, Monte Carlo."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    train, validation = _loader(problem.train), _loader(problem.validation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        default = Laplace(copy.deepcopy(network), "classification")
        default.fit(train)
        default.optimize_prior_precision()
        total_seconds = seconds + time.perf_counter() - start
        yield "laplace_default", _tried(problem, "laplace-torch, default", default, total_seconds)
        start = time.perf_counter()
        # Its default backend cannot make a full matrix on a GPU (version 0.3: an identity is left on the CPU).
        tuned = Laplace(copy.deepcopy(network), "classification", hessian_structure="full", backend=BackPackGGN)
        tuned.fit(train)
        tuned.optimize_prior_precision(
            method="gridsearch", val_loader=validation, pred_type="glm", link_approx="mc", n_samples=1000
        )
        total_seconds = seconds + time.perf_counter() - start
        options = {"link_approx": "mc", "n_samples": 1000}
        yield "laplace_tuned", _tried(problem, "laplace-torch, tuned", tuned, total_seconds, **options)


def _tried(problem: Problem, name: str, laplace: Any, seconds: float, **options: Any) -> Method:
    """A method that has predicted once: only then does laplace-torch factorise, which may fail."""
    method = _method(name, laplace, seconds, **options)
    method(problem.validation.x[:2])
    return method


def _method(name: str, laplace: Any, seconds: float, **options: Any) -> Method:
    def predict(x: Tensor) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Its Jacobians take memory and time quadratic in the batch.
            pmf = torch.cat([laplace(part, **options).detach() for part in x.split(256)])
        return Outcome(pmf)

    return Method(name, predict, seconds, {"prior_precision": float(laplace.prior_precision.flatten()[0])})


def _loader(samples: Samples) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(samples.x, samples.y), batch_size=512)
