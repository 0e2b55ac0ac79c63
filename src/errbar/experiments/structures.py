"""The structures of the posterior compared: more parameters approximately, or fewer exactly.

All with the exact Fisher information, the prior by evidence, and T and T_c by NLL on the validation data.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import errbar
from errbar import metrics
from errbar._base.progress import track
from errbar.experiments.methods import batched, calibrated, of_posterior
from errbar.experiments.problem import Problem
from errbar.experiments.runs import Parts

# With `kron`, a layer of a large network with shared weights needs the derivative by all of them for each input. The
# other structures of such a whole network take longer than all methods together: they get fewer outliers, and only in
# the first run.
_LARGE = 1_000_000
_FEW_OUTLIERS = 2500
_WHOLE = {"parameters": "all"}


@dataclass(frozen=True)
class Choice:
    """Which parameters, and the structure of their information."""

    name: str
    structure: str
    select: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        return self.select == _WHOLE


def choices(network: nn.Module, heads: tuple[int, ...], *, first_run: bool) -> Iterator[Choice]:
    """`heads` are the numbers of last layers to look at; then the whole network, the longest fit at the end."""
    for count in heads:
        layers = "last layer" if count == 1 else f"last {count} layers"
        for structure in ("dense", "kron", "diag") if count == 1 else ("dense", "block", "kron", "diag"):
            yield Choice(f"{layers}, {structure}", structure, {"last_layers": count})
    is_large = sum(parameter.numel() for parameter in network.parameters()) > _LARGE
    of_large = ("diag", "lowrank") if first_run else ()
    for structure in of_large if is_large else ("diag", "kron", "lowrank"):
        yield Choice(f"whole network, {structure}", structure, _WHOLE)


def study(
    network: nn.Module,
    problem: Problem,
    parts: Parts,
    heads: tuple[int, ...] = (1, 2),
    *,
    first_run: bool,
    title: str = "",
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Scores on the test data, AUROC against the outliers, and cost, of each choice."""
    candidates = track(list(choices(network, heads, first_run=first_run)), f"{title}: structures", enabled=progress)
    return [parts(f"structure: {choice.name}", partial(_one, network, problem, choice)) for choice in candidates]


def _one(network: nn.Module, problem: Problem, choice: Choice) -> dict[str, Any]:
    start = time.perf_counter()
    information = _information(network, problem, choice)
    with warnings.catch_warnings():
        # A prior at the edge of the candidates is not a warning here.
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        prior = errbar.choose_prior(information, precisions=problem.priors)
    posterior = errbar.condition(information, prior)
    if problem.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    method = of_posterior(
        choice.name, calibrated(posterior, problem, "nll", ("temperature", "covariance_scale")), seconds
    )
    start = time.perf_counter()
    outcome = method(problem.test.x)
    inside, labels = outcome.outlier_scores(), problem.test.y
    predict_seconds = time.perf_counter() - start
    areas: dict[str, dict[str, float]] = {}
    few = _FEW_OUTLIERS if information.n_parameters > _LARGE else None
    for name, foreign in problem.outliers.items():
        for score, outside in method(foreign[:few]).outlier_scores().items():
            values = torch.cat([inside[score], outside]).cpu()
            positive = torch.arange(len(values)) >= len(labels)
            areas.setdefault(name, {})[score] = metrics.auroc(values, positive)
    return {
        "name": choice.name,
        "parameters": information.n_parameters,
        "samples": information.n_samples,
        "accuracy": metrics.accuracy(outcome.pmf, labels),
        "nll": metrics.nll(outcome.pmf, labels),
        "ece": 100 * metrics.ece(outcome.pmf, labels),
        "auroc": areas,
        "fitted": method.fitted,
        "fit_seconds": seconds,
        "predict_seconds": predict_seconds / len(labels),
    }


def _information(network: nn.Module, problem: Problem, choice: Choice) -> errbar.Information:
    """From all training data; for a whole network from as many as the problem says, scaled to all."""
    train, limit = problem.train, problem.whole_network_samples
    count = len(train.y)
    if not choice.is_whole or limit >= count:
        return errbar.collect(network, batched(train), structure=choice.structure, **choice.select)
    subset = train.take(torch.arange(limit, device=problem.device) * count // limit)
    return errbar.collect(network, batched(subset), structure=choice.structure, **choice.select) * (count / limit)
