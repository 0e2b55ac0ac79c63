"""Networks that were trained elsewhere: CIFAR-10 ResNets of a third party.

All training data went into them, so one half of the test data calibrates and the other reports.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import errbar
from errbar.errors import ArgumentError, DataError
from errbar.experiments import automatic, datasets, methods, structures
from errbar.experiments.evaluation import evaluate
from errbar.experiments.methods import Method, batched, of_posterior
from errbar.experiments.problem import Problem, Recipe, Samples, halves
from errbar.experiments.resnet import cifar_resnet, load_pretrained, normalise
from errbar.experiments.runs import Parts, RunOptions, assembled, described, kept_run, save
from errbar.experiments.shifts import BLUR, CONTRAST, NOISE, quick_shifts

DEPTHS = {"resnet20": 20, "resnet32": 32}
_SHIFTS = (NOISE, BLUR, CONTRAST)


class _FromPixels(nn.Module):
    """Takes pixels in [0, 1], as all networks of the experiments do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(normalise(pixels))
        return logits


def pretrained(options: RunOptions) -> dict[str, Any]:
    """Calibrate on one half of the test data and report on the other, for several choices of parameters.

    The runs differ only in how the halves are drawn: the network is the same.
    """
    start = time.perf_counter()
    if options.data is None:
        raise ArgumentError(
            f"The experiment {options.name} needs its data: give the folder that holds them with --data."
        )
    device = torch.device(options.device)
    network = load_network(options.data, options.name, device)
    problem = partial(pretrained_problem, options.name, options.data, device=device, quick=options.quick)

    def compare(seed: int, title: str) -> dict[str, Any]:
        method_by_key = _methods(network, problem(seed))
        results = evaluate(method_by_key, problem(seed), title=title, progress=options.progress)
        if seed > 0:
            del results["roc"]
        return {"methods": {key: method.name for key, method in method_by_key.items()}, **results}

    def compute(seed: int, parts: Parts) -> dict[str, Any]:
        title = f"Half {seed + 1} of {options.count()}"
        run = {"seed": seed, **parts("comparison", lambda: compare(seed, title))}
        run["autofit"] = parts(
            "autofit", lambda: automatic.study(network, problem(seed), title=title, progress=options.progress)
        )
        run["structures"] = structures.study(
            network,
            problem(seed),
            parts,
            heads=(1,),
            first_run=seed == 0,
            title=title,
            progress=options.progress,
        )
        return run

    description = described(options, problem(0))
    for seed in range(options.count()) if options.only is None else [options.only]:
        kept_run(options, description, seed, partial(compute, seed))
    result = {**assembled(options, description), "seconds": time.perf_counter() - start}
    save(result, options)
    return result


def load_network(folder: Path, name: str, device: torch.device) -> nn.Module:
    return _FromPixels(load_pretrained(find_weights(folder, name))).to(device).eval()


def pretrained_problem(name: str, folder: Path, seed: int, device: torch.device, *, quick: bool = False) -> Problem:
    """CIFAR-10 with its test data halved by a seed."""
    split = datasets.read_cifar10(folder)
    few = 100 if quick else None
    train, rest = (
        Samples(part.pixels()[:few].to(device), part.y[:few].to(device)) for part in (split.train, split.test)
    )
    validation, test = halves(rest, seed)
    return Problem(
        name=name,
        train=train,
        validation=validation,
        test=test,
        network=lambda dropout: cifar_resnet(DEPTHS[name]),
        recipe=Recipe(epochs=200, batch_size=128, learning_rate=0.1),
        members=0,
        outliers={"SVHN": datasets.read_svhn(folder).pixels()[:few].to(device)},
        shifts=quick_shifts(_SHIFTS) if quick else _SHIFTS,
        whole_network_samples=50 if quick else 10_000,
    )


def _methods(network: nn.Module, problem: Problem) -> dict[str, Method]:
    compared = {
        "standard": methods.standard(network, 0.0),
        "temperature": methods.tempered("(ii) temp. scaling", network, problem, "ece", 0.0),
        "temperature_nll": methods.tempered("temp. scaling, T by NLL", network, problem, "nll", 0.0),
    }
    norms = [name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)]
    last = next(name for name, module in reversed(list(network.named_modules())) if isinstance(module, nn.Linear))
    both = ("eta", "ggn")
    selections: tuple[tuple[str, str, Any, tuple[str, ...]], ...] = (
        ("last", "last layer", [last], both),
        ("norms", "last layer and norms", [last, *norms], both),
        # The same parameters in these networks, by one drawn label per picture.
        ("vectors", "vectors", "vectors", ("sampled",)),
    )
    for key, name, parameters, fishers in selections:
        for fisher in fishers:
            start = time.perf_counter()
            information = errbar.collect(network, batched(problem.train), parameters=parameters, fisher=fisher)
            posterior = max(
                (errbar.condition(information, errbar.Prior(precision)) for precision in problem.priors),
                key=lambda candidate: candidate.log_evidence(),
            )
            seconds = time.perf_counter() - start
            compared[f"{key}_{fisher}"] = of_posterior(f"{name}, {fisher}", posterior, seconds)
            calibrated = methods.calibrated(posterior, problem, "nll", ("temperature", "covariance_scale"))
            compared[f"{key}_{fisher}_both"] = of_posterior(f"{name}, {fisher}, T and T_c", calibrated, seconds)
            softened = methods.calibrated(posterior, problem, "nll", methods.SCALES)
            compared[f"{key}_{fisher}_softened"] = of_posterior(
                f"{name}, {fisher}, T, T_c and softening", softened, seconds
            )
    compared["both"] = compared.pop("last_ggn_both")
    return compared


def find_weights(folder: Path, name: str) -> Path:
    """The published weights in a folder of data, or one sentence about where they come from."""
    places = [folder, folder / "pretrained_cifar10"]
    for place in places:
        paths = sorted(place.glob(f"{name}-*.th"))
        if paths:
            return paths[0]
    raise DataError(
        f"No weights of {name}: looked for {name}-*.th in {' and '.join(map(str, places))}. They come from the "
        "repository akamaster/pytorch_resnet_cifar10 on GitHub, folder pretrained_models."
    )
