"""Is the covariance itself right? Studies in which p(y|x) is known, as in no real data set.

- `coverage(LOGISTIC)`: do the intervals of a logistic regression hold the true f_m(x) as often as they say? Here the
  delta method is exact and the truth is one of the models: only Laplace's approximation can be wrong.
- `coverage(NETWORK)`: the same for a network, which also has bias and several optima, and is not linear.
- `coverage(AUTOFIT)`: and with what `autofit` chooses.
- `linearisation`: what the delta method costs, against sampling of the parameters themselves.
- `monte_carlo_error`: what finitely many draws cost.
- `run`: all of them, as one JSON-ready dict, which docs/results/coverage.json holds.

A *re-draw* is a new training set from the same p(y|x), with the model that is fitted to it. Inputs and classes of one
re-draw are dependent, but re-draws are not, so standard errors count re-draws.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import errbar
from errbar._base.progress import track
from errbar.experiments.training import seeded

# PMF, its standard deviation, shares covered by level, distance to the optimum, T, T_c, whether at the bound of one.
Outcome = tuple[Tensor, Tensor, list[float], float, float, float, bool]
PREDICT = {"logits": errbar.Posterior.predict, "parameters": errbar.Posterior.predict_by_parameters}
FISHERS = ("ggn", "eta")
COUNTS: tuple[int, ...] = (10, 30, 100, 300, 1000, 3000, 10_000)
LAST_LAYERS = {"last layer": 1, "last two layers": 2, "all": None}
_quartiles = partial(statistics.quantiles, n=4, method="inclusive")


@dataclass(frozen=True)
class CoverageSettings:
    """A truth, the models that are fitted to samples of it, and what is measured.

    x ~ N(0, I). Truth and models are tanh networks inputs – hidden – classes, each model with initial weights of its
    own. Without hidden layers they are logistic regressions, fitted by L-BFGS; others by Adam on all samples at once,
    with a learning rate that falls to zero as a cosine. Both minimise −Σ ln f_y + ½ λ |θ|², λ the prior precision.
    """

    hidden: tuple[int, ...] = ()
    classes: int = 2
    inputs: int = 2
    logit_scale: float = 1.5
    train_size: int = 120
    held_out_size: int = 0
    prior_precision: float = 1e-2
    steps: int = 500
    learning_rate: float = 5e-2
    redraws: int = 300
    points: int = 8
    parameters: tuple[str, ...] = ("all",)
    calibrations: tuple[tuple[str, ...], ...] = ((),)
    sampled: tuple[str, ...] = ("logits",)
    levels: tuple[float, ...] = (0.5, 0.8, 0.95)
    samples: int = 1000
    calibration_samples: int = 200
    autofit_redraws: int = 0
    seed: int = 0


LOGISTIC = CoverageSettings()
NETWORK = CoverageSettings(
    hidden=(16, 16),
    classes=3,
    logit_scale=2.0,
    train_size=500,
    held_out_size=500,
    prior_precision=0.5,
    steps=3000,
    redraws=60,
    points=50,
    parameters=("last two layers", "all"),
    calibrations=((), ("covariance_scale",), ("temperature", "covariance_scale")),
    sampled=("logits", "parameters"),
)
# The same with what `autofit` chooses for each re-draw, beside what `calibrate` gives.
AUTOFIT = replace(NETWORK, redraws=20, sampled=("logits",), autofit_redraws=20)


@dataclass(frozen=True, eq=False)
class Redraws:
    """Models, the training set of each, held-out samples for each; inputs to ask them about, and the truth there."""

    models: tuple[nn.Module, ...]
    x: Float[Tensor, "R N D"]
    y: Int[Tensor, "R N"]
    held_out_x: Float[Tensor, "R H D"]
    held_out_y: Int[Tensor, "R H"]
    points: Float[Tensor, "B D"]
    truth: Float[Tensor, "B M"]
    prior: errbar.Prior

    def posterior(self, redraw: int, parameters: str, fisher: str) -> errbar.Posterior:
        layers, data = LAST_LAYERS[parameters], [(self.x[redraw], self.y[redraw])]
        selection: dict[str, Any] = {"parameters": "all"} if layers is None else {"last_layers": layers}
        return errbar.condition(errbar.collect(self.models[redraw], data, fisher=fisher, **selection), self.prior)


def coverage(settings: CoverageSettings = LOGISTIC, *, device: str = "cpu", progress: bool = False) -> dict[str, Any]:
    """How often intervals hold the true f_m(x), for each choice of parameters, Fisher, and what `calibrate` fits."""
    if settings.redraws < 2:
        raise errbar.ArgumentError(f"redraws is {settings.redraws}; expected two or more: a standard error needs them.")
    redraws = redraw_and_fit(settings, device=device, progress=progress)
    truth, levels = redraws.truth, settings.levels
    outcomes: dict[tuple[str, str, tuple[str, ...], str], list[Outcome]] = {}
    for redraw in track(range(settings.redraws), "Fitting posteriors", enabled=progress):
        held_out = [(redraws.held_out_x[redraw], redraws.held_out_y[redraw])]
        for parameters, fisher in product(settings.parameters, FISHERS):
            posterior = redraws.posterior(redraw, parameters, fisher)
            distance = distance_to_optimum(posterior, redraws.x[redraw], redraws.y[redraw])
            for scales_to_fit in settings.calibrations:
                calibrated_posterior, at_bound = _calibrated(
                    posterior, held_out, scales_to_fit, settings.calibration_samples
                )
                # Parameters are sampled without calibration only: T and T_c are fitted to what the delta method says.
                for space in settings.sampled[: 1 if scales_to_fit else None]:
                    prediction = PREDICT[space](calibrated_posterior, redraws.points, settings.samples, seed=redraw)
                    outcome = _outcome(prediction, truth, levels, distance, calibrated_posterior, at_bound)
                    outcomes.setdefault((parameters, fisher, scales_to_fit, space), []).append(outcome)
        if redraw < settings.autofit_redraws:
            chosen = _chosen(redraws, redraw, held_out)
            prediction = chosen.predict(redraws.points, settings.samples, seed=redraw)
            distance = distance_to_optimum(chosen, redraws.x[redraw], redraws.y[redraw])
            outcome = _outcome(prediction, truth, levels, distance, chosen, at_bound=False)
            outcomes.setdefault(("chosen", "ggn", ("autofit",), "logits"), []).append(outcome)
    names = ("parameters", "fisher", "fitted", "sampled")
    rows = [
        dict(zip(names, case, strict=True)) | _summary(case_outcomes, truth, levels)
        for case, case_outcomes in outcomes.items()
    ]
    return {"settings": asdict(settings), "results": rows}


def _outcome(
    prediction: errbar.Prediction,
    truth: Float[Tensor, "B M"],
    levels: Sequence[float],
    distance: float,
    posterior: errbar.Posterior,
    at_bound: bool,
) -> Outcome:
    inside = [(low <= truth) & (truth <= high) for low, high in map(prediction.interval, levels)]
    shares = [float(mask.double().mean()) for mask in inside]
    scales = posterior.temperature, posterior.covariance_scale, at_bound
    return prediction.pmf, prediction.std, shares, distance, *scales


def _chosen(redraws: Redraws, redraw: int, held_out: Any) -> errbar.Posterior:
    """What `autofit` makes of a re-draw, whose model it takes as any other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        train = [(redraws.x[redraw], redraws.y[redraw])]
        return errbar.autofit(redraws.models[redraw], train, held_out).posterior


def linearisation(posterior: errbar.Posterior, x: Any, samples: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """The delta method (eq:gmarg) against sampling of the parameters (eq:genMC), and the Monte Carlo floor of both.

    The distance of two PMFs is their total variation ½ Σ_m |f_m − f'_m|, that of two standard deviations likewise
    ½ Σ_m |σ_m − σ'_m|; mean and maximum are over the inputs. A floor is the distance between two independent seeds
    of one method. `std_ratio` is Σ σ by the delta method over Σ σ by parameters.
    """
    delta = [posterior.predict(x, samples, 4 * seed + number) for number in (0, 1)]
    # Seeds of their own: with equal ones, some draws would be the same.
    whole = [posterior.predict_by_parameters(x, samples, 4 * seed + number) for number in (2, 3)]
    pairs = {
        "delta_against_parameters": (delta[0], whole[0]),
        "floor_of_delta": (delta[0], delta[1]),
        "floor_of_parameters": (whole[0], whole[1]),
    }
    return {
        "samples": samples,
        "seed": seed,
        "inputs": len(delta[0]),
        "pmf": {name: _half_distance(first.pmf, second.pmf) for name, (first, second) in pairs.items()},
        "std": {name: _half_distance(first.std, second.std) for name, (first, second) in pairs.items()},
        "std_ratio": float((delta[0].std + delta[1].std).sum() / (whole[0].std + whole[1].std).sum()),
    }


def monte_carlo_error(
    gaussian: errbar.LogitGaussian, samples: Sequence[int] = COUNTS, repeats: int = 20, seed: int = 0
) -> dict[str, Any]:
    """The root mean square error of the PMF and of P^f with K draws of each kind, over inputs, entries and `repeats`.

    The reference is 2¹⁸ Sobol points; a slope is that of ln error over ln K by least squares.
    """
    if len(set(samples)) < 2 or repeats < 1:
        raise errbar.ArgumentError(
            f"samples is {samples!r} and repeats {repeats!r}; expected two different samples for a slope, one repeat."
        )
    first = seed * (repeats + 1)  # the reference has a seed of its own: nested Sobol points would look too good
    reference = gaussian.predict(2**18, first, draws="sobol")
    errors: dict[str, dict[str, Any]] = {}
    for draws in ("random", "antithetic", "sobol"):
        pmf, covariance = [], []
        for count in samples:
            predictions = [gaussian.predict(count, first + 1 + repeat, draws=draws) for repeat in range(repeats)]
            pmf.append(_rms(torch.stack([p.pmf - reference.pmf for p in predictions])))
            covariance.append(_rms(torch.stack([p.covariance - reference.covariance for p in predictions])))
        slopes = {"pmf_slope": _log_slope(samples, pmf), "covariance_slope": _log_slope(samples, covariance)}
        errors[draws] = {"pmf": pmf, "covariance": covariance, **slopes}
    sizes = {"inputs": len(gaussian), "classes": gaussian.mean.shape[1], "repeats": repeats, "seed": seed}
    return {**sizes, "reference_samples": 2**18, "samples": list(samples), "errors": errors}


def run(quick: bool = False, progress: bool = False) -> dict[str, Any]:
    """All studies, the last two about the first re-draw; `quick` with few re-draws. Five significant digits."""
    start = time.monotonic(), time.process_time()
    logistic, network, samples, repeats, counts = LOGISTIC, NETWORK, 10_000, 20, COUNTS
    if quick:
        logistic = replace(logistic, redraws=40)
        network = replace(network, redraws=2, steps=200, held_out_size=100, points=20, samples=100, autofit_redraws=0)
        samples, repeats, counts = 100, 10, COUNTS[:5]
    studies = {f"logistic_{classes}": replace(logistic, classes=classes) for classes in (2, 3)} | {"network": network}
    first = redraw_and_fit(replace(network, redraws=1))
    posteriors = {(name, fisher): first.posterior(0, name, fisher) for name in LAST_LAYERS for fisher in FISHERS}
    ten = redraw_and_fit(replace(logistic, classes=10, redraws=1))
    gaussians = {
        "network, all parameters, ggn": posteriors["all", "ggn"].logits(first.points),
        "logistic, ten classes, ggn": ten.posterior(0, "all", "ggn").logits(ten.points),
    }
    result: dict[str, Any] = {
        "quick": quick,
        "versions": {"errbar": errbar.__version__, "torch": str(torch.__version__)},
        "coverage": {name: coverage(settings, progress=progress) for name, settings in studies.items()},
        "linearisation": [
            {"parameters": name, "fisher": fisher, **linearisation(posterior, first.points, samples)}
            for (name, fisher), posterior in posteriors.items()
        ],
        "monte_carlo_error": [
            {"gaussian": name, **monte_carlo_error(gaussian, counts, repeats)} for name, gaussian in gaussians.items()
        ],
    }
    result["seconds"] = {"wall": time.monotonic() - start[0], "processor": time.process_time() - start[1]}
    return {name: _rounded(part) for name, part in result.items()}


def redraw_and_fit(settings: CoverageSettings, *, device: str = "cpu", progress: bool = False) -> Redraws:
    """The truth and the inputs follow from the seed; re-draw number r from the seed and r, however many there are."""
    generator = torch.Generator().manual_seed(settings.seed)
    truth = _truth(settings, generator)
    points = torch.randn(settings.points, settings.inputs, generator=generator, dtype=torch.float64)
    seeds = [1_000_000 * (settings.seed + 1) + redraw for redraw in range(settings.redraws)]
    sample_sets = [_draw(truth, settings, seed) for seed in seeds]
    x, y = (torch.stack(part).to(device) for part in zip(*sample_sets, strict=True))
    cut = settings.train_size
    models = tuple(_network(settings, seed).to(device) for seed in seeds)
    _fit_together(models, x[:, :cut], y[:, :cut], settings, progress)
    sets = x[:, :cut], y[:, :cut], x[:, cut:], y[:, cut:]
    prior = errbar.Prior(settings.prior_precision)
    return Redraws(models, *sets, points.to(device), truth(points).softmax(1).to(device), prior)


def _fit_together(
    models: Sequence[nn.Module],
    x: Float[Tensor, "R N D"],
    y: Int[Tensor, "R N"],
    settings: CoverageSettings,
    progress: bool,
) -> None:
    """All models at once, with their parameters stacked: much faster than one small model after the other.

    The objective is a sum with one term for each model. Adam treats each number by itself, so no model sees another;
    L-BFGS goes to the optimum of the sum, which is convex, and so to that of each term.
    """
    values: dict[str, Tensor] = torch.func.stack_module_state(list(models))[0]
    forward = torch.func.vmap(lambda one, inputs: torch.func.functional_call(models[0], one, (inputs,)))
    parameters = list(values.values())
    adam = torch.optim.Adam(parameters, lr=settings.learning_rate)
    exact = torch.optim.LBFGS(parameters, 1, settings.steps, None, 1e-9, 1e-15, 30, "strong_wolfe")
    optimiser: torch.optim.Optimizer = adam if settings.hidden else exact
    steps = settings.steps if settings.hidden else 1  # one step of L-BFGS goes all the way
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)

    def objective() -> float:
        optimiser.zero_grad(set_to_none=True)
        loss = _loss(forward(values, x).flatten(0, 1), y.flatten(), parameters, settings.prior_precision) / x.shape[1]
        loss.backward()
        return float(loss.detach())

    for _ in track(range(steps), f"Training {len(models)} models", enabled=progress):
        optimiser.step(objective)
        schedule.step()
    for redraw, model in enumerate(models):
        model.load_state_dict({name: value.detach()[redraw] for name, value in values.items()})


def _loss(logits: Tensor, labels: Tensor, parameters: Sequence[Tensor], precision: float) -> Float[Tensor, ""]:
    """−Σ ln f_y + ½ λ |θ|²."""
    squares = nn.utils.parameters_to_vector(parameters).square().sum()
    return nn.functional.cross_entropy(logits, labels, reduction="sum") + precision / 2 * squares


def distance_to_optimum(posterior: errbar.Posterior, x: Float[Tensor, "N D"], y: Int[Tensor, "N"]) -> float:
    """√(sᵀ P s), s the gradient of Σ ln f_y − ½ λ |θ|²: by how many standard deviations of the chosen parameters
    training missed their optimum. For a prior with one λ."""
    parameters = dict(posterior.model.named_parameters())
    selected_parameters = [parameters[name] for name in posterior.information.parameter_names]
    loss = _loss(posterior.model(x), y, selected_parameters, float(posterior.prior.precision))  # type: ignore[arg-type]
    score = nn.utils.parameters_to_vector(torch.autograd.grad(loss, selected_parameters)).double()
    return math.sqrt(max(float(score @ posterior.covariance() @ score), 0.0))


def _network(settings: CoverageSettings, seed: int) -> nn.Sequential:
    """Initial weights by torch's own rule, from the seed, in float64."""
    layers: list[nn.Module] = []
    with seeded(seed, torch.device("cpu")):
        for widths in pairwise((settings.inputs, *settings.hidden, settings.classes)):
            layers += [nn.Linear(*widths), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


@torch.no_grad()
def _truth(settings: CoverageSettings, generator: torch.Generator) -> nn.Sequential:
    """Weights N(0, 4/fan-in), biases N(0, 1), the last layer scaled: the root mean square of the logits, less their
    mean over the classes, is `logit_scale` over x ~ N(0, I)."""
    network = _network(settings, settings.seed)
    for parameter in network.parameters():
        gain = 2 / math.sqrt(parameter.shape[1]) if parameter.ndim == 2 else 1.0
        parameter.copy_(gain * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    logits = network(torch.randn(4096, settings.inputs, generator=generator, dtype=torch.float64))
    for parameter in network[-1].parameters():
        parameter.mul_(settings.logit_scale / _rms(logits - logits.mean(1, keepdim=True)))
    return network.requires_grad_(False)


def _draw(truth: nn.Module, settings: CoverageSettings, seed: int) -> tuple[Float[Tensor, "N D"], Int[Tensor, "N"]]:
    """x ~ N(0, I) and labels y ~ p(y|x), these by inversion of the cumulative probability."""
    generator = torch.Generator().manual_seed(seed)
    size = settings.train_size + settings.held_out_size
    x = torch.randn(size, settings.inputs, generator=generator, dtype=torch.float64)
    uniform = torch.rand(size, 1, generator=generator, dtype=torch.float64)
    return x, (truth(x).softmax(1).cumsum(1)[:, :-1] < uniform).sum(1)


def _calibrated(
    posterior: errbar.Posterior, held_out: Any, names: tuple[str, ...], samples: int
) -> tuple[errbar.Posterior, bool]:
    """The calibrated posterior, and whether an optimum ran to its bound."""
    if not names:
        return posterior, False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errbar.CalibrationWarning)
        calibrated = errbar.calibrate(posterior, held_out, fit=names, samples=samples)
    return calibrated, any(issubclass(warning.category, errbar.CalibrationWarning) for warning in caught)


def _summary(outcomes: Sequence[Outcome], truth: Float[Tensor, "B M"], levels: Sequence[float]) -> dict[str, Any]:
    """Coverage by level; and, as root mean squares over inputs and classes, what the error bars are about:

    `bias` of the PMF averaged over re-draws (of which spread/√R is chance), its `spread` over re-draws, its `error`
    against the truth, and the `std` that the method states for it. Of T, T_c and the distance to the optimum the
    quartiles over re-draws; `at_bound` counts the re-draws whose held-out samples do not determine T or T_c.
    """
    pmfs, stds, shares, distances, temperatures, covariance_scales, at_bound = zip(*outcomes, strict=True)
    by_level = {}
    for level, values in zip(levels, zip(*shares, strict=True), strict=True):
        error = statistics.stdev(values) / math.sqrt(len(values))
        by_level[f"{level:g}"] = {"measured": statistics.fmean(values), "standard_error": error}
    pmf = torch.stack(pmfs)
    return {
        "coverage": by_level,
        "bias": _rms(pmf.mean(0) - truth),
        "spread": _rms(pmf.std(0)),
        "error": _rms(pmf - truth),
        "std": _rms(torch.stack(stds)),
        "distance_to_optimum": _quartiles(distances),
        "temperature": _quartiles(temperatures),
        "covariance_scale": _quartiles(covariance_scales),
        "at_bound": sum(at_bound),
    }


def _half_distance(first: Float[Tensor, "B M"], second: Float[Tensor, "B M"]) -> dict[str, float]:
    distance = (first - second).abs().sum(1) / 2
    return {"mean": float(distance.mean()), "max": float(distance.max())}


def _rms(values: Float[Tensor, "..."]) -> float:
    return float(values.square().mean().sqrt())


def _log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    return statistics.linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope


def _rounded(value: Any) -> Any:
    """Floats to five significant digits, at any depth; tuples become lists, as JSON makes them."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
