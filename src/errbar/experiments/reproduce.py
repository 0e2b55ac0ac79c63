"""`errbar reproduce`: train, compare, fuse, clean, draw; a result file from which tables and figures follow.

Each run (seed) trains its own networks. They are kept, and so is each part of a run: an interrupted experiment
continues where it stopped.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import errbar
from errbar import metrics
from errbar._base.progress import track
from errbar._fusion.track import option_name
from errbar.experiments import automatic, cleaning, coverage, methods, peers, sequences, structures
from errbar.experiments.evaluation import contrasting, evaluate, scores
from errbar.experiments.methods import Method, batched
from errbar.experiments.problem import Problem, Samples
from errbar.experiments.problems import Experiment, build
from errbar.experiments.runs import Parts, RunOptions, assembled, described, kept_run, save
from errbar.experiments.store import kept
from errbar.experiments.training import train
from errbar.experiments.views import views

_SCALES = tuple(10 ** (exponent / 4) for exponent in range(-12, 13))
# Seeds of members, of the network with dropout and of further networks, far enough apart to share none.
RUN, _DROPOUT, OTHER = 1000, 900, 950


def reproduce(options: RunOptions) -> dict[str, Any]:
    """Run an experiment and write `<output>/<name>.json`."""
    start = time.perf_counter()
    count = options.count()
    experiment = build(options.name, options.data, quick=options.quick, device=torch.device(options.device))
    description = described(options, experiment.problem)
    for seed in range(count) if options.only is None else [options.only]:
        compute = partial(_run, experiment, options.output / "networks" / options.stem, seed, count, options.progress)
        kept_run(options, description, seed, compute)
    result = assembled(options, description)
    for run in result["runs"]:
        if "illustration" in run:
            result["illustration"], result["fusion"] = run.pop("illustration"), {"strip": run.pop("strip")}
    _combine_sequences(result)
    result["seconds"] = time.perf_counter() - start
    save(result, options)
    return result


def _run(experiment: Experiment, folder: Path, seed: int, count: int, progress: bool, parts: Parts) -> dict[str, Any]:
    """All results of one seed; the first also has pictures and curves."""
    problem, title = experiment.problem, f"Run {seed + 1} of {count}"
    base = seed * RUN
    run = {"seed": seed, **parts("comparison", lambda: _compare(problem, folder, seed, title, progress))}

    # Computed only when a part that is not kept needs them.
    @cache
    def network() -> nn.Module:
        return trained(problem, problem.train, folder, base)[0]

    @cache
    def posterior() -> errbar.Posterior:
        return main_posterior(network(), problem, problem.train)

    def curve() -> dict[str, Any]:
        information = errbar.collect(network(), batched(problem.train), last_layers=2, fisher="eta")
        paper = errbar.condition(information, decay(problem))
        return scale_curve(paper, problem)

    run["scale_curve"] = parts("scale curve", curve)
    run["linearisation"] = parts(
        "linearisation", lambda: coverage.linearisation(posterior(), problem.test.x[:200], samples=_draws(problem))
    )
    run["autofit"] = parts(
        "autofit",
        lambda: automatic.study(network(), problem, groups=tracks(experiment), title=title, progress=progress),
    )
    run["fusion"] = parts("fusion", lambda: fusion(experiment, posterior(), folder, base, progress=progress))
    if experiment.foreign is not None:
        run["cleaning"] = parts("cleaning", lambda: clean(experiment, folder, base, progress=progress))
    if seed == 0:
        run["illustration"] = parts("illustration", lambda: illustration(posterior(), problem))
        run["strip"] = parts("strip", lambda: strip(experiment, posterior()))
    if problem.outliers:
        # Last: the information about a whole network takes longer than everything else together.
        run["structures"] = structures.study(
            network(), problem, parts, first_run=seed == 0, title=title, progress=progress
        )
    return run


def _compare(problem: Problem, folder: Path, seed: int, title: str, progress: bool) -> dict[str, Any]:
    """All methods on the same data."""
    base = seed * RUN
    members, seconds = [], []
    for number in track(range(problem.members), f"{title}: training the ensemble", enabled=progress):
        network, duration = trained(problem, problem.train, folder, base + number)
        members.append(network)
        seconds.append(duration)
    with_dropout, dropout_seconds = trained(problem, problem.train, folder, base + _DROPOUT, problem.recipe.dropout)
    network, one = members[0], seconds[0]
    compared: dict[str, Method] = {
        "standard": methods.standard(network, one),
        "temperature": methods.tempered("(ii) temp. scaling", network, problem, "ece", one),
        "ensemble": methods.ensemble(members, sum(seconds)),
        "dropout": methods.dropout(with_dropout, problem.dropout_samples, seed, dropout_seconds),
        "temperature_nll": methods.tempered("temp. scaling, T by NLL", network, problem, "nll", one),
    }
    results: dict[str, Any] = {}
    if peers.available():
        try:
            compared.update(peers.laplace_methods(network, problem, one))
        except Exception as error:  # a peer's failure is reported, and must not stop the rest
            results["peers_failed"] = f"{type(error).__name__}: {error}"
    posteriors = methods.posteriors(network, problem, one)
    compared.update(track(posteriors, f"{title}: fitting posteriors", total=9, enabled=progress))
    order = ["standard", "temperature", "ensemble", "dropout", "proposed", "proposed_tc"]
    compared = {key: compared[key] for key in [*order, *(key for key in compared if key not in order)]}
    results["methods"] = {key: method.name for key, method in compared.items()}
    results.update(evaluate(compared, problem, title=title, progress=progress))
    if seed > 0:
        del results["roc"]
    return results


def _draws(problem: Problem) -> int:
    """Networks drawn to check the linearisation: fewer where the test data are few as well, for a first look."""
    return min(1000, len(problem.test.y))


def decay(problem: Problem) -> errbar.Prior:
    return errbar.Prior.from_weight_decay(problem.recipe.weight_decay, len(problem.train.y))


def main_posterior(network: nn.Module, problem: Problem, samples: Samples) -> errbar.Posterior:
    """What errbar recommends: the exact Fisher information, T and T_c by NLL on the validation data."""
    posterior = errbar.condition(errbar.collect(network, batched(samples), last_layers=2), decay(problem))
    return methods.calibrated(posterior, problem, "nll", ("temperature", "covariance_scale"))


def trained(
    problem: Problem, samples: Samples, folder: Path, seed: int, dropout: float = 0.0, kind: str = "network"
) -> tuple[nn.Module, float]:
    """A network of the problem, trained on `samples`, or the one kept from an earlier run."""
    recipe = problem.recipe
    with torch.random.fork_rng(devices=[]):
        template = problem.network(dropout).to(problem.device)

    def make() -> nn.Module:
        return train(
            template,
            samples.x,
            samples.y,
            epochs=recipe.epochs,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            batch_size=recipe.batch_size,
            bfloat16=recipe.bfloat16_on_gpu and samples.x.is_cuda,
            seed=seed,
        )

    made_by = {**asdict(recipe), "dropout": dropout, "seed": seed, "samples": len(samples.y), "kind": kind}
    return kept(folder / f"{kind}-{seed}.safetensors", made_by, template, make)


def scale_curve(posterior: errbar.Posterior, problem: Problem) -> dict[str, Any]:
    """NLL and ECE of the paper's method on the validation data, over T_c."""
    x, y = problem.validation
    gaussians = [posterior.logits(part) for part in x.split(2048)]
    curve: dict[str, Any] = {"covariance_scale": list(_SCALES), "nll": [], "ece": []}
    for scale in _SCALES:
        pmf = torch.cat([gaussian.scaled(scale).predict().pmf for gaussian in gaussians])
        curve["nll"].append(metrics.nll(pmf, y))
        curve["ece"].append(100 * metrics.ece(pmf, y))
    best = {name: _SCALES[min(range(len(_SCALES)), key=curve[name].__getitem__)] for name in ("nll", "ece")}
    return {**curve, "chosen": best}


def fusion(
    experiment: Experiment, posterior: errbar.Posterior, folder: Path, base: int, *, progress: bool
) -> dict[str, Any]:
    """Frames of one object, and two classifiers that were trained on different halves of the data."""
    problem = experiment.problem
    held_out, test_sequences = sequences_of(experiment)
    noise = errbar.frame_noise(posterior, held_out[0])
    correlation = sequences.frame_correlation(posterior, *held_out)
    chosen = errbar.calibrate_track(posterior, *held_out, progress=progress)
    study = sequences.study(
        posterior, *test_sequences, noise=noise, correlation=correlation, chosen=chosen, progress=progress
    )
    choice = {"option": option_name(chosen), "nll": chosen.comparison}
    results: dict[str, Any] = {"sequences": {**study, "correlation": correlation, "choice": choice}}
    classifiers = []
    for part in (0, 1):
        half = problem.train.take(slice(part, None, 2))
        network, _ = trained(problem, half, folder, base + OTHER + part, kind="half")
        classifiers.append(main_posterior(network, problem, half))
    results["classifiers"] = sequences.two_classifiers(classifiers, problem.test.x, problem.test.y)
    return results


def tracks(experiment: Experiment) -> list[int] | None:
    """The number of the track of each validation sample."""
    if experiment.sequences is None:
        return None
    frames = experiment.sequences[0].frames.shape[1]
    return [row // frames for row in range(len(experiment.problem.validation.y))]


def sequences_of(experiment: Experiment) -> tuple[tuple[Tensor, Tensor], ...]:
    """Frames and labels, to fit frame noise on and to report on: real ones, or views of pictures."""
    if experiment.sequences is not None:
        return tuple((part.frames, part.labels) for part in experiment.sequences)
    frames, most = experiment.views
    parts = []
    for seed, (x, y) in enumerate((experiment.problem.validation, experiment.problem.test)):
        count = min(most, len(y))
        frames_of_pictures = views(x[:count].cpu(), frames, degrees=10.0, pixels=1.0, noise=0.1, seed=seed)
        parts.append((frames_of_pictures.to(x.device), y[:count]))
    return tuple(parts)


def strip(experiment: Experiment, posterior: errbar.Posterior) -> dict[str, Any]:
    """The sequence with the least confident first frame, with the PMFs of each method after each frame."""
    held_out, (frames, labels) = sequences_of(experiment)
    noise = errbar.frame_noise(posterior, held_out[0])
    doubt = posterior.logits(frames[:, 0]).predict().confidence.argmin()
    fused = sequences.gaussians([sequences.joint_logits(posterior, frames[doubt])], noise)
    pmf = {name: [gaussian.predict().pmf[0].tolist() for gaussian in each] for name, each in fused.items()}
    return {"images": frames[doubt].tolist(), "pmf": pmf, "label": int(labels[doubt])}


def clean(experiment: Experiment, folder: Path, base: int, *, progress: bool) -> dict[str, Any]:
    """2 % wrong labels and 1 % foreign pictures in the training data: who finds them, and what that gains."""
    problem, foreign = experiment.problem, experiment.foreign
    assert foreign is not None
    device, classes = problem.device, len(problem.class_names)
    pixels = (255 * problem.train.x).round().byte().cpu()
    images, labels, kind = cleaning.contaminate(
        pixels, problem.train.y.cpu(), (255 * foreign).round().byte().cpu(), classes=classes, seed=base
    )
    dirty = Samples(images.to(device).float() / 255, labels.to(device))
    network, _ = trained(problem, dirty, folder, base, kind="dirty")
    posterior = errbar.condition(errbar.collect(network, batched(dirty), last_layers=2), decay(problem))
    ranking = cleaning.rank(posterior, dirty.x, dirty.y, progress=progress)
    results: dict[str, Any] = {"ranking": cleaning.report(ranking, kind), "retrained": {}}
    count = int((kind > 0).sum())
    removed: dict[str, Tensor] = {}
    for name in ("suspicion plus entropy", "label suspicion", "loss plus entropy"):
        removed[name] = ranking[name].cpu().argsort(descending=True)[:count]
    removed["what is wrong"] = (kind > 0).nonzero()[:, 0]
    networks = {"nothing": network}
    for name, rows in removed.items():
        mask = torch.ones(len(kind), dtype=torch.bool)
        mask[rows] = False
        rest = dirty.take(mask.nonzero()[:, 0].to(device))
        networks[name], _ = trained(problem, rest, folder, base, kind=f"without {name}".replace(" ", "-"))
    for name, again in networks.items():
        results["retrained"][name] = scores(methods.standard(again, 0.0)(problem.test.x).pmf, problem.test.y)
    return results


def illustration(posterior: errbar.Posterior, problem: Problem) -> list[dict[str, Any]]:
    """The paper's Figure 1: a certain input, then two ambiguous ones with similar PMFs and different logits."""
    x, y = problem.test.x[:2000], problem.test.y[:2000]
    gaussian = posterior.logits(x)
    prediction = gaussian.predict()
    return [
        {
            "image": x[index].tolist(),
            "mean": gaussian.mean[index].tolist(),
            "covariance": gaussian.covariance[index].tolist(),
            "pmf": prediction.pmf[index].tolist(),
            "std": prediction.std[index].tolist(),
            "label": int(y[index]),
        }
        for index in contrasting(gaussian, prediction.pmf)
    ]


def _combine_sequences(result: dict[str, Any]) -> None:
    """The mean over the runs, for the figure."""
    runs = [run["fusion"]["sequences"] for run in result["runs"]]
    mean = {
        method: {
            name: [
                sum(values) / len(values)
                for values in zip(*(run["methods"][method][name] for run in runs), strict=True)
            ]
            for name in of_method
        }
        for method, of_method in runs[0]["methods"].items()
    }
    result.setdefault("fusion", {})["sequences"] = {"frames": list(range(1, runs[0]["frames"] + 1)), "methods": mean}
