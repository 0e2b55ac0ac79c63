"""`errbar reproduce acquire-mnist` and `acquire-cifar10`: accuracy by the number of labels, for each rule of `acquire`.

Each run draws a pool from the training data and a few labels to begin with, the same for all rules. In each round a
network is trained on the labels so far, from scratch and with the seed of the run; a posterior of its last layer
chooses the inputs to label next; and the accuracy on the test data is noted. There are no held-out labels, so the
posterior is not calibrated, and its prior is not chosen.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

import errbar
from errbar import metrics
from errbar._base.progress import track
from errbar._deciding.acquire import RULES
from errbar.errors import ArgumentError
from errbar.experiments.evaluation import paired
from errbar.experiments.networks import paper_network, small_convolutional_network
from errbar.experiments.problem import Problem, Samples
from errbar.experiments.problems import build
from errbar.experiments.runs import Parts, RunOptions, assembled, described, kept_run
from errbar.experiments.runs import save as save_result
from errbar.experiments.training import train

_PREFIX = "acquire-"


@dataclass(frozen=True)
class Campaign:
    """How labels are bought: so many inputs in the pool, labels to begin with, labels in each round, rounds; and how a
    network is trained on them: in so many steps, with weight decay.

    `small` takes a network of three layers in place of that of the problem, or for pictures in colour one of three
    small convolutions and two layers: there are hundreds of trainings.
    """

    pool: int
    first: int
    each: int
    rounds: int
    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    prior: float = 1.0
    samples: int = 200
    small: bool = False


CAMPAIGNS = {
    "mnist": Campaign(pool=3000, first=20, each=20, rounds=20, steps=150, small=True),
    "cifar10": Campaign(pool=5000, first=100, each=100, rounds=20, steps=200, small=True),
    "digits": Campaign(pool=900, first=10, each=10, rounds=20, steps=200),
}
_QUICK = Campaign(pool=200, first=10, each=5, rounds=3, steps=5, samples=50, small=True)
NAMES = tuple(f"{_PREFIX}{name}" for name in CAMPAIGNS)


def acquisitions(options: RunOptions) -> dict[str, Any]:
    """Run an experiment on acquisition and write `<output>/<name>.json`."""
    start = time.perf_counter()
    name = options.name.removeprefix(_PREFIX)
    if options.data is None and name != "digits":
        raise ArgumentError(
            f"The experiment {options.name} needs its data: give the folder that holds them with --data."
        )
    problem = build(name, options.data, quick=options.quick, device=torch.device(options.device)).problem
    campaign = _QUICK if options.quick else CAMPAIGNS[name]
    description = described(options, problem)
    description["settings"] |= {"campaign": asdict(campaign)}
    for seed in range(options.count()) if options.only is None else [options.only]:
        kept_run(options, description, seed, partial(_run, problem, campaign, options.progress, seed))
    result = assembled(options, description)
    result["seconds"] = time.perf_counter() - start
    save_result(result, options)
    return result


def _run(problem: Problem, campaign: Campaign, progress: bool, seed: int, parts: Parts) -> dict[str, Any]:
    """The curve of each rule, from the same pool and the same first labels."""
    labels = [campaign.first + number * campaign.each for number in range(campaign.rounds + 1)]
    curves = {rule: parts(rule, partial(curve, problem, campaign, rule, seed, progress=progress)) for rule in RULES}
    return {"seed": seed, "methods": {}, "acquired": {"labels": labels, "curves": curves}}


def curve(
    problem: Problem, campaign: Campaign, rule: str, seed: int, *, progress: bool = False
) -> dict[str, list[float]]:
    """Accuracy on the test data after each round, and the seconds of each choice."""
    order = torch.randperm(len(problem.train.y), generator=torch.Generator().manual_seed(seed))
    pool = problem.train.take(order[: campaign.pool].to(problem.device))
    chosen = torch.arange(min(campaign.first, len(pool.y)))
    accuracy, seconds = [], []
    for number in track(range(campaign.rounds + 1), f"Run {seed + 1}, {rule}", enabled=progress):
        model = _trained(problem, campaign, pool.take(chosen.to(problem.device)), seed)
        accuracy.append(metrics.accuracy(mean_pmf(model, problem.test), problem.test.y))
        if number == campaign.rounds:
            break
        start = time.process_time()
        own_seed = seed * (campaign.rounds + 1) + number
        chosen = torch.cat([chosen, chosen_next(model, campaign, pool, chosen, rule, own_seed)])
        seconds.append(time.process_time() - start)
    return {"accuracy": accuracy, "seconds": seconds}


def chosen_next(
    model: nn.Module, campaign: Campaign, pool: Samples, chosen: Int[Tensor, " L"], rule: str, seed: int
) -> Int[Tensor, " k"]:
    """The next inputs of the pool: those without a label are ranked by a posterior of those with one."""
    rest = torch.ones(len(pool.y), dtype=torch.bool)
    rest[chosen] = False
    open_rows = rest.nonzero()[:, 0]
    with warnings.catch_warnings():
        # Wide posteriors are expected here: there are few labels, and none to calibrate with.
        warnings.simplefilter("ignore", errbar.PosteriorWarning)
        posterior = errbar.fit(
            model, [pool.x[chosen.to(pool.x.device)]], last_layers=1, prior=errbar.Prior(campaign.prior)
        )
    unlabelled = pool.x[open_rows.to(pool.x.device)]
    count = min(campaign.each, len(open_rows))
    picked = errbar.acquire(
        posterior, list(unlabelled.split(1000)), count, by=rule, samples=campaign.samples, seed=seed
    )
    return open_rows[picked]


def _trained(problem: Problem, campaign: Campaign, labelled: Samples, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        template = (_small_network(problem) if campaign.small else problem.network(0.0)).to(problem.device)
    return train(
        template,
        labelled.x,
        labelled.y,
        epochs=math.ceil(campaign.steps / math.ceil(len(labelled.y) / campaign.batch_size)),
        learning_rate=campaign.learning_rate,
        weight_decay=campaign.weight_decay,
        batch_size=campaign.batch_size,
        seed=seed,
    )


def _small_network(problem: Problem) -> nn.Module:
    one, classes = problem.train.x[0], len(problem.class_names)
    if one.ndim == 3 and len(one) == 3:
        return small_convolutional_network(classes)
    return nn.Sequential(nn.Flatten(), *paper_network(one.numel(), hidden=(), classes=classes))


def mean_pmf(model: nn.Module, samples: Samples) -> Tensor:
    """The softmax of the network alone."""
    with torch.no_grad():
        return torch.cat([model(part).softmax(1) for part in samples.x.split(2048)])


def summary(runs: list[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each rule the accuracies in per cent, runs by rounds, and the mean over the rounds less that of "random",
    paired by run."""
    curves = {rule: [[100 * a for a in run["acquired"]["curves"][rule]["accuracy"]] for run in runs] for rule in RULES}
    means = {rule: [sum(own[1:]) / len(own[1:]) for own in each] for rule, each in curves.items()}
    return {
        rule: {"accuracy": each, "minus_random": paired(means[rule], means["random"])} for rule, each in curves.items()
    }
