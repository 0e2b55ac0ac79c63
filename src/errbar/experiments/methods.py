"""The methods of the comparison, each from one trained network (or several) to PMFs and outlier scores.

The paper's methods follow it: the diagonal Fisher information (`eta`), T and T_c by ECE. Unless its name says
otherwise, a method's prior corresponds to the weight decay of the training, so it is not chosen at all.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

import errbar
from errbar import metrics
from errbar.experiments.baselines import dropout_pmfs, ensemble_pmfs, softmax_pmf
from errbar.experiments.problem import Problem, Samples

_PART = 2048  # inputs at a time, for networks with convolutions
_SAMPLES = 1000
# Everything that `calibrate` can fit.
SCALES = ("temperature", "covariance_scale", "softening")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a method says about N inputs; the scores are higher for stranger inputs."""

    pmf: Float[Tensor, "N M"]
    mutual_information: Float[Tensor, "N"] | None = None
    contrast_variance: Float[Tensor, "N"] | None = None

    def outlier_scores(self) -> dict[str, Float[Tensor, "N"]]:
        scores = {
            "entropy": torch.special.entr(self.pmf).sum(1),
            "maximum probability": -self.pmf.amax(1),
            "mutual information": self.mutual_information,
            "contrast variance": self.contrast_variance,
        }
        return {name: score for name, score in scores.items() if score is not None}


@dataclass(frozen=True, eq=False)
class Method:
    """A way to PMFs. `fitted` is what was chosen, on validation data only; `seconds` the time to prepare it."""

    name: str
    predict: Callable[[Float[Tensor, "N ..."]], Outcome]
    seconds: float = 0.0
    fitted: dict[str, float] = field(default_factory=dict)
    posterior: errbar.Posterior | None = None

    def __call__(self, x: Float[Tensor, "N ..."]) -> Outcome:
        parts = [self.predict(part) for part in x.split(_PART)]
        return Outcome(
            torch.cat([part.pmf for part in parts]),
            _joined([part.mutual_information for part in parts]),
            _joined([part.contrast_variance for part in parts]),
        )


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def batched(samples: Samples, size: int = _PART) -> list[tuple[Tensor, Tensor]]:
    return list(zip(samples.x.split(size), samples.y.split(size), strict=True))


def of_posterior(name: str, posterior: errbar.Posterior, seconds: float) -> Method:
    def predict(x: Tensor) -> Outcome:
        gaussian = posterior.logits(x)
        prediction = gaussian.predict(_SAMPLES)
        return Outcome(prediction.pmf, prediction.mutual_information, gaussian.contrast_variance)

    precision = posterior.prior.precision
    scales = dict(vars(posterior.calibration))
    if isinstance(precision, float | int):
        scales["prior_precision"] = float(precision)
    return Method(name, predict, seconds, scales, posterior)


def of_members(name: str, members: Callable[[Tensor], Float[Tensor, "C N M"]], seconds: float) -> Method:
    """The mean of several PMFs; mutual information is their disagreement, H(mean) − mean H."""

    def predict(x: Tensor) -> Outcome:
        pmfs = members(x)
        pmf = pmfs.mean(0)
        disagreement = torch.special.entr(pmf).sum(1) - torch.special.entr(pmfs).sum(2).mean(0)
        return Outcome(pmf, disagreement)

    return Method(name, predict, seconds)


def standard(network: nn.Module, seconds: float) -> Method:
    return Method("(i) standard", lambda x: Outcome(softmax_pmf(network, x)), seconds)


def tempered(name: str, network: nn.Module, problem: Problem, objective: str, seconds: float) -> Method:
    """Temperature scaling: T by `objective` on the validation data."""
    watch = _Watch()
    # Any posterior with T_c = 0 is the plain softmax: the smallest one will do.
    information = errbar.collect(network, batched(problem.train)[:1], last_layers=1)
    certain = errbar.condition(information, errbar.Prior()).with_calibration(covariance_scale=0.0)
    T = calibrated(certain, problem, objective, ("temperature",)).temperature
    scales = {"temperature": T}
    return Method(name, lambda x: Outcome(softmax_pmf(network, x, T)), seconds + watch.seconds(), scales)


def ensemble(members: Sequence[nn.Module], seconds: float) -> Method:
    return of_members(f"(iii) ensemble of {len(members)}", lambda x: ensemble_pmfs(members, x), seconds)


def dropout(network: nn.Module, samples: int, seed: int, seconds: float) -> Method:
    return of_members("(iv) MC dropout", lambda x: dropout_pmfs(network, x, samples=samples, seed=seed), seconds)


def posteriors(network: nn.Module, problem: Problem, seconds: float) -> Iterator[tuple[str, Method]]:
    """The paper's (v) and (vi), and the same with the exact Fisher information, other priors, T and T_c, and c."""
    train = batched(problem.train)
    decay = errbar.Prior.from_weight_decay(problem.recipe.weight_decay, len(problem.train.y))

    watch = _Watch()
    paper = errbar.condition(errbar.collect(network, train, last_layers=2, fisher="eta"), decay)
    yield "proposed", of_posterior("(v) proposed", paper, seconds + watch.seconds())
    scaled = calibrated(paper, problem, "ece", ("covariance_scale",))
    yield "proposed_tc", of_posterior("(vi) proposed, T_c", scaled, seconds + watch.seconds())
    scaled_nll = calibrated(paper, problem, "nll", ("covariance_scale",))
    yield "proposed_tc_nll", of_posterior("proposed, T_c by NLL", scaled_nll, seconds + watch.seconds())

    watch = _Watch()
    information = errbar.collect(network, train, last_layers=2)
    plain = errbar.condition(information, decay)
    yield "ggn", of_posterior("ggn", plain, seconds + watch.seconds())
    both = calibrated(plain, problem, "nll", ("temperature", "covariance_scale"))
    yield "both", of_posterior("ggn, T and T_c", both, seconds + watch.seconds())
    softened = calibrated(plain, problem, "nll", SCALES)
    yield "softened", of_posterior("ggn, T, T_c and softening", softened, seconds + watch.seconds())

    watch = _Watch()
    by_evidence = max(
        (errbar.condition(information, errbar.Prior(p)) for p in problem.priors), key=lambda p: p.log_evidence()
    )
    yield "evidence", of_posterior("ggn, prior by evidence", by_evidence, seconds + watch.seconds())
    both = calibrated(by_evidence, problem, "nll", ("temperature", "covariance_scale"))
    yield "evidence_both", of_posterior("ggn, prior by evidence, T and T_c", both, seconds + watch.seconds())

    watch = _Watch()
    best: tuple[float, errbar.Posterior] | None = None
    for precision in problem.priors:
        posterior = errbar.condition(information, errbar.Prior(precision))
        nll = metrics.nll(of_posterior("", posterior, 0.0)(problem.validation.x).pmf, problem.validation.y)
        if best is None or nll < best[0]:
            best = nll, posterior
    assert best is not None
    yield "validation", of_posterior("ggn, prior by validation", best[1], seconds + watch.seconds())
    both = calibrated(best[1], problem, "nll", ("temperature", "covariance_scale"))
    yield "validation_both", of_posterior("ggn, prior by validation, T and T_c", both, seconds + watch.seconds())


def calibrated(posterior: errbar.Posterior, problem: Problem, objective: str, fit: tuple[str, ...]) -> errbar.Posterior:
    with warnings.catch_warnings():
        # T_c at its bound is not a warning here; the tables show it.
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        return errbar.calibrate(posterior, batched(problem.validation), objective=objective, fit=fit)


class _Watch:
    """Seconds since it was created, after the device has finished its work."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self.start
