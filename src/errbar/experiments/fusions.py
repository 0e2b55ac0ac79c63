"""`errbar reproduce fusion-mnist` and `frames-mnist`: several classifiers, and several frames, fused in every way.

Each run trains its own networks, which are those of `errbar reproduce mnist` with the same seed, and keeps −ln f_y of
each reported input by each method beside its result, so that differences can be paired by input over all runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load, save
from torch import Tensor

import errbar
from errbar._base.atomic import write_file
from errbar._base.progress import track
from errbar._calibration.folds import group_numbers, standard_error
from errbar._distributions.calibration import Calibration
from errbar._distributions.covariance import FullCovariance
from errbar.errors import ArgumentError
from errbar.experiments import fusing, tracking
from errbar.experiments.fusing import Seen, calibration_of, gaussians_of
from errbar.experiments.methods import batched
from errbar.experiments.pretrained import load_network, pretrained_problem
from errbar.experiments.problem import Problem, Samples
from errbar.experiments.problems import Experiment, build
from errbar.experiments.reproduce import OTHER, RUN, decay, sequences_of, trained
from errbar.experiments.runs import Parts, RunOptions, assembled, described, kept_run
from errbar.experiments.runs import save as save_result
from errbar.experiments.shifts import BLUR, CONTRAST, Shift

RESNETS, _PAIR = "fusion-resnets", "ResNet-20 and -32"
# Sizes of the ensembles, and whether there are two networks trained on halves of the data.
_ENSEMBLES = {"mnist": (5, 10), "cifar10": (5,), "gtsrb": (5,), "digits": (5,)}
_HALVES = {"mnist", "cifar10", "digits"}
_SEQUENCES, _FRAMES = ("mnist", "gtsrb", "digits"), "frames"
NAMES = (*(f"fusion-{name}" for name in _ENSEMBLES), RESNETS, *(f"{_FRAMES}-{name}" for name in _SEQUENCES))
# Third-party networks: so many training pictures stand for all, the prior precision, and how severe shifts are.
_PICTURES, _TRAINING_SET, _PRIOR, _SEVERITY = 5000, 50_000, 10.0, 5
_SHIFTS: dict[str, Shift | None] = {"as they are": None, "blur": BLUR, "contrast": CONTRAST}
_NORMAL_95 = 1.96
# Losses of one case and report: method → −ln f_y, with the number of the object of each input.
Losses = Mapping[str, Float[Tensor, "N"]]
_OBJECTS = "objects"


@dataclass(frozen=True, eq=False)
class Experience:
    """What networks say about the inputs to fit to and about those to report on, with T and T_c of each network."""

    held_out: Seen
    reports: Mapping[str, Seen]
    calibrations: Sequence[Calibration]


@dataclass(frozen=True, eq=False)
class Member:
    """Logits of the validation and of the test inputs by one network, with T and T_c by the former."""

    logits: Sequence[errbar.LogitGaussian]
    calibration: Calibration


def fusions(options: RunOptions) -> dict[str, Any]:
    """Run an experiment on fusion and write `<output>/<name>.json`."""
    start = time.perf_counter()
    if options.data is None and _data(options) != "digits":
        raise ArgumentError(
            f"The experiment {options.name} needs its data: give the folder that holds them with --data."
        )
    device = torch.device(options.device)
    if options.name == RESNETS:
        assert options.data is not None
        problem = partial(pretrained_problem, "resnet20", options.data, device=device, quick=options.quick)
        described_by, compute = problem(0), partial(_resnets, options, problem)
    else:
        experiment = build(_data(options), options.data, quick=options.quick, device=device)
        of_one = _frames if options.name.startswith(_FRAMES) else _members
        described_by, compute = experiment.problem, partial(of_one, options, experiment)
    description = described(options, described_by)
    for seed in range(options.count()) if options.only is None else [options.only]:
        kept_run(options, description, seed, partial(compute, seed))
    result = assembled(options, description)
    seeds = [run["seed"] for run in result["runs"]]
    result["pooled"] = pooled([_read(_losses_path(options, seed)) for seed in seeds])
    result["seconds"] = time.perf_counter() - start
    save_result(result, options)
    return result


# ------------------------------------------------------------------------------------------------------ networks


def _members(options: RunOptions, experiment: Experiment, seed: int, parts: Parts) -> dict[str, Any]:
    """Ensembles, and two networks of halves, for one seed."""
    problem, name = experiment.problem, _data(options)
    base, path = seed * RUN, _losses_path(options, seed)
    sizes = (2,) if options.quick else _ENSEMBLES[name]
    objects = [_objects(experiment, part) for part in (0, 1)]

    @cache
    def member(number: int) -> Member:
        return _member(problem, member_logits(options, problem, problem.train, base + number))

    def ensemble(size: int) -> dict[str, Any]:
        numbers = track(range(size), f"Run {seed + 1}: training the ensemble", enabled=options.progress)
        found = _experience([member(number) for number in numbers], problem, objects)
        return _compared(options, path, f"{size} members", found, seed)

    def halves() -> dict[str, Any]:
        members = [_member(problem, half_logits(options, problem, base, half)) for half in (0, 1)]
        return _compared(options, path, "halves", _experience(members, problem, objects), seed)

    run: dict[str, Any] = {"seed": seed, "methods": {}, "cases": {}}
    if name in _HALVES:
        run["cases"]["halves"] = parts("halves", halves)
    for size in sizes:
        run["cases"][f"{size} members"] = parts(f"{size} members", partial(ensemble, size))
    return run


def _frames(options: RunOptions, experiment: Experiment, seed: int, parts: Parts) -> dict[str, Any]:
    """Sequences as the first network of a run sees them."""
    problem, folder = experiment.problem, _networks(options)

    def study() -> dict[str, Any]:
        posterior = _posterior(problem, problem.train, folder, seed * RUN)
        held_out, report = (tracking.Frames(*part) for part in sequences_of(experiment))
        found = tracking.study(posterior, held_out, report, progress=options.progress)
        losses = {f"{length}": of_methods for length, of_methods in found.losses.items()}
        _keep(_losses_path(options, seed), _FRAMES, losses, torch.arange(len(report.labels)))
        return found.facts

    return {"seed": seed, "methods": {}, "frames": parts("frames", study)}


def _networks(options: RunOptions) -> Path:
    """Where `errbar reproduce` of the same data keeps its networks."""
    name = _data(options)
    return options.output / "networks" / (f"{name}-quick" if options.quick else name)


def _data(options: RunOptions) -> str:
    return options.name.split("-", 1)[1]


def _posterior(problem: Problem, samples: Samples, folder: Path, seed: int, kind: str = "network") -> errbar.Posterior:
    """The exact information about the last two layers, with the prior of the weight decay; not calibrated."""
    network, _ = trained(problem, samples, folder, seed, kind=kind)
    return errbar.condition(errbar.collect(network, batched(samples), last_layers=2), decay(problem))


def _objects(experiment: Experiment, part: int) -> Tensor:
    """The number of the object of each validation or test input: frames of one track show one."""
    samples = (experiment.problem.validation, experiment.problem.test)[part]
    frames = 1 if experiment.sequences is None else experiment.sequences[part].frames.shape[1]
    return torch.arange(len(samples.y)) // frames


def half_logits(options: RunOptions, problem: Problem, base: int, half: int) -> list[errbar.LogitGaussian]:
    """Logits of the network that was trained on every second sample."""
    return member_logits(options, problem, problem.train.take(slice(half, None, 2)), base + OTHER + half, kind="half")


def member_logits(
    options: RunOptions, problem: Problem, samples: Samples, seed: int, kind: str = "network"
) -> list[errbar.LogitGaussian]:
    """Logits of the validation and of the test inputs by one network: those of its file, if they were kept there."""
    path = options.output / "logits" / _networks(options).name / f"{kind}-{seed}.safetensors"
    if not path.exists():
        posterior = _posterior(problem, samples, _networks(options), seed, kind=kind)
        _keep_logits(path, [gaussians_of(posterior, part.x) for part in (problem.validation, problem.test)])
    return _kept_logits(path)


def _keep_logits(path: Path, gaussians: Sequence[errbar.LogitGaussian]) -> None:
    """Means as they are, covariances in single precision."""
    tensors: dict[str, Tensor] = {}
    for number, gaussian in enumerate(gaussians):
        tensors[f"mean {number}"] = gaussian.mean.contiguous()
        tensors[f"covariance {number}"] = gaussian.covariance.float().contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(tensors))


def _kept_logits(path: Path) -> list[errbar.LogitGaussian]:
    tensors = load(path.read_bytes())
    return [
        errbar.LogitGaussian(tensors[f"mean {number}"], FullCovariance(tensors[f"covariance {number}"].double()))
        for number in range(len(tensors) // 2)
    ]


def _member(problem: Problem, logits: Sequence[errbar.LogitGaussian]) -> Member:
    return Member(logits, calibration_of(logits[0], problem.validation.y.cpu(), problem.device))


def _experience(members: Sequence[Member], problem: Problem, objects: Sequence[Tensor]) -> Experience:
    held_out, report = (
        Seen([member.logits[part] for member in members], samples.y.cpu(), objects[part])
        for part, samples in enumerate((problem.validation, problem.test))
    )
    return Experience(held_out, {"test": report}, [member.calibration for member in members])


def _calibrations(held_out: Seen, device: torch.device) -> list[Calibration]:
    return [calibration_of(one, held_out.labels, device) for one in held_out.gaussians]


def _resnets(options: RunOptions, problem: Callable[[int], Problem], seed: int, parts: Parts) -> dict[str, Any]:
    """ResNet-20 and -32 of a third party, on one halving of the test pictures; the logits of all are kept."""
    names = ("resnet20", "resnet32")
    assert options.data is not None
    halved = problem(seed)
    folder = options.output / "logits" / ("quick" if options.quick else "all")

    @cache
    def posterior(name: str) -> errbar.Posterior:
        assert options.data is not None
        x, y = halved.train
        chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:_PICTURES].to(y.device)
        batches = batched(Samples(x[chosen], y[chosen]), 250)
        network = load_network(options.data, name, halved.device)
        information = errbar.collect(network, batches, parameters="vectors", progress=options.progress)
        return errbar.condition(information * (_TRAINING_SET / len(chosen)), errbar.Prior(_PRIOR))

    def logits(name: str, title: str, x: Tensor) -> errbar.LogitGaussian:
        path = folder / f"{name}-{title.replace(' ', '-')}.safetensors"
        if not path.exists():
            shift = _SHIFTS[title]
            shifted = x if shift is None else shift.apply(x, _SEVERITY)
            _keep_logits(path, [gaussians_of(posterior(name), shifted, progress=options.progress)])
        return _kept_logits(path)[0]

    def compared() -> dict[str, Any]:
        # The pictures in the order of the data set, whatever the halving.
        order, middle = halves_of(len(halved.validation.y) + len(halved.test.y), seed)
        x, y = (
            torch.cat(pair)[order.argsort().to(halved.device)]
            for pair in zip(halved.validation, halved.test, strict=True)
        )
        seen = {
            title: Seen([logits(name, title, x) for name in names], y.cpu(), torch.arange(len(y))) for title in _SHIFTS
        }
        held_out = seen["as they are"].chosen(order[:middle])
        reports = {title: of_title.chosen(order[middle:]) for title, of_title in seen.items()}
        found = Experience(held_out, reports, _calibrations(held_out, halved.device))
        return _compared(options, _losses_path(options, seed), _PAIR, found, seed)

    return {"seed": seed, "methods": {}, "cases": {_PAIR: parts("compared", compared)}}


def halves_of(count: int, seed: int) -> tuple[Tensor, int]:
    """The order in which `problem.halves` divides so many samples, and where the second half begins."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)), count // 2


def _compared(options: RunOptions, path: Path, case: str, found: Experience, seed: int) -> dict[str, Any]:
    """The facts of a comparison; its losses go to the file of the run."""
    comparison = fusing.compare(found.held_out, found.reports, found.calibrations, seed=seed, device=options.device)
    _keep(path, case, comparison.losses, next(iter(found.reports.values())).objects)
    return comparison.facts


# -------------------------------------------------------------------------------------------------------- losses


def _losses_path(options: RunOptions, seed: int) -> Path:
    return options.output / "losses" / f"{options.stem}-{seed}.safetensors"


def _keep(path: Path, case: str, losses: Mapping[str, Losses], objects: Tensor) -> None:
    """Add the losses of a case to the file of the run."""
    tensors = load(path.read_bytes()) if path.exists() else {}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{case}/")}
    for report, of_methods in losses.items():
        tensors[f"{case}/{report}/{_OBJECTS}"] = objects.clone()
        tensors |= {f"{case}/{report}/{name}": own.float().contiguous() for name, own in of_methods.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(tensors))


def _read(path: Path) -> dict[str, Tensor]:
    return load(path.read_bytes())


def pooled(runs: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Case → report → NLL of each method over all runs, and its difference to the method that is asked about.

    Differences are paired by input; their 95 % intervals take inputs of one object, in one run or in several, as one.
    """
    result: dict[str, Any] = {}
    for place in dict.fromkeys(name.rsplit("/", 1)[0] for name in sorted(runs[0])):
        case, report = place.split("/")
        known, asked = (
            (tracking.METHODS, (tracking.TRACK, tracking.CHOSEN))
            if case == _FRAMES
            else (fusing.METHODS, (fusing.FUSED, fusing.FUSED_RAW))
        )
        # A file has them in no particular order.
        losses = {name: torch.cat([run[f"{place}/{name}"] for run in runs]) for name in known}
        objects = torch.cat([run[f"{place}/{_OBJECTS}"] for run in runs])
        groups = group_numbers(objects.tolist(), len(objects))
        result.setdefault(case, {})[report] = {
            "nll": {name: float(own.double().mean()) for name, own in losses.items()},
            "minus": {name: _differences(losses[name], losses, groups) for name in asked},
        }
    ordered = {case: dict(sorted(found.items(), key=_rank)) for case, found in result.items()}
    return dict(sorted(ordered.items(), key=_rank))


def _rank(item: tuple[str, Any]) -> int:
    """Numbers of frames and of members by size, shifts as they are listed, the rest first."""
    number = item[0].split()[0]
    return int(number) if number.isdecimal() else list(_SHIFTS).index(item[0]) if item[0] in _SHIFTS else 0


def _differences(first: Tensor, others: Losses, objects: Tensor) -> dict[str, list[float]]:
    """first − other: the mean and half the width of its interval."""
    found = {}
    for name, own in others.items():
        difference = first.double() - own.double()
        found[name] = [float(difference.mean()), _NORMAL_95 * standard_error(difference, objects)]
    return found
