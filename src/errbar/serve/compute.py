"""The computation of answers: many predictions in one run of the network, and each fusion by itself.

A request's numbers are those of `posterior.predict(x, samples, seed)`. The draws depend on the seed alone, so other
requests in a batch change only the rounding of matrix products (docs/design.md says by how much).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import errbar
from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.prediction import LabelPrediction, Prediction
from errbar._distributions.sampling import GivenSampler
from errbar.errors import ArgumentError
from errbar.serve.engine import LEVEL, SAMPLES, SEED, Columns
from errbar.serve.service import Served

# Draws of the logits that are sent for plotting.
POINTS = 200
# Where less is left for the next class, the tails of the draws decide which one that is, and so the variances.
_RARE = 0.01
# Samples of one request stored while its statistics are computed; if there are more, each statistic redraws them.
_STORED = 2**21


@dataclass(frozen=True)
class AnswerOptions:
    """The choices of a request; where T, T_c or c is None, the posterior's own is used.

    `thresholds` are γ, one per class or one for all; None if no risk is requested.
    """

    temperature: float | None = None
    covariance_scale: float | None = None
    softening: float | None = None
    samples: int = SAMPLES
    seed: int = SEED
    level: float = LEVEL
    thresholds: float | tuple[float, ...] | None = None
    include: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Predict:
    """The PMFs of some inputs."""

    served: Served
    x: Tensor
    options: AnswerOptions
    ids: tuple[str, ...] = ()
    monitored: bool = False


@dataclass(frozen=True, eq=False)
class FuseFrames:
    """Frames of one object, seen by one classifier: as a track, or with the covariance R between them."""

    served: Served
    x: Tensor
    options: AnswerOptions
    joint: bool = False


@dataclass(frozen=True, eq=False)
class FusePosteriors:
    """The same inputs, each seen by several classifiers."""

    members: tuple[Served, ...]
    x: Tensor
    options: AnswerOptions


@dataclass(frozen=True, eq=False)
class FuseGaussians:
    """Logits of one object from several classifiers, perhaps of other services."""

    classes: tuple[str, ...]
    gaussians: tuple[LogitGaussian, ...]
    options: AnswerOptions


Work = Predict | FuseFrames | FusePosteriors | FuseGaussians
Answer = list[dict[str, Any]]


def compute(works: Sequence[Work]) -> list[Answer]:
    """The answers to work items, in their order."""
    answers: dict[int, Answer] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, work in enumerate(works):
        if isinstance(work, Predict):
            key = (id(work.served), work.x.shape[1:], work.x.dtype)
            groups.setdefault(key, []).append(place)
        else:
            answers[place] = [_fused(work)] if not isinstance(work, FusePosteriors) else _fused_posteriors(work)
    for places in groups.values():
        group_answers = predict_together([works[place] for place in places])  # type: ignore[misc]
        answers.update(zip(places, group_answers, strict=True))
    return [answers[place] for place in range(len(works))]


def predict_together(works: Sequence[Predict]) -> list[Answer]:
    """What is usual by one run of the graph, if there is one. Of the rest one run of the network for all that need
    P^g; one sampling, with its statistics, per set of options.
    """
    served = works[0].served
    answers = _by_graph(served, works)
    kinds: dict[AnswerOptions, list[int]] = {}
    for place, work in enumerate(works):
        if place not in answers:
            kinds.setdefault(work.options, []).append(place)
    rest = [place for places in kinds.values() for place in places]
    by_covariance = [place for place in rest if not _draws_parameters(served, works[place].options)]
    logits = _logits(served, works, by_covariance)
    for options, places in kinds.items():
        x = torch.cat([works[place].x for place in places])
        if _draws_parameters(served, options):
            plain = served.drawn_logits(x, options.samples, options.seed)
        else:
            plain = LogitGaussian.concatenated([logits[place] for place in places])
        result = _result(served.calibrated(plain, _calibration(served, options)), options)
        scores = served.outlier_scores(x, plain) if "outlier" in options.include else None
        descriptions = iter(result.described(served.classes, options, served, scores))
        for place in places:
            answers[place] = [next(descriptions) for _ in range(len(works[place].x))]
    return [answers[place] for place in range(len(works))]


def is_usual(served: Served, options: AnswerOptions) -> bool:
    """Whether a request leaves T, T_c, c, samples and seed as they are, so that answers can be compared."""
    if (options.samples, options.seed) != (SAMPLES, SEED):
        return False
    chosen = options.temperature, options.covariance_scale, options.softening
    if chosen == (None, None, None):
        return True
    own = served.posterior.calibration
    mine = own.temperature, own.covariance_scale, own.softening
    return all(value is None or value == known for value, known in zip(chosen, mine, strict=True))


def _by_graph(served: Served, works: Sequence[Predict]) -> dict[int, Answer]:
    """The answers to those requests that the graph can answer, by their places."""
    graph = served.engine.graph
    places = [place for place, work in enumerate(works) if _is_in_graph(served, work.options)]
    if graph is None or not places:
        return {}
    # Not by torch.cat, which gives the interpreter's lock away.
    columns = graph(torch.from_numpy(np.concatenate([works[place].x.numpy() for place in places])))
    if columns is None:
        return {}
    answers: dict[int, Answer] = {}
    start = 0
    for place in places:
        rows = range(start, start + len(works[place].x))
        start = rows.stop
        answers[place] = [{name: values[row] for name, values in columns.items()} for row in rows]
        for entry in answers[place]:
            if "outlier" in works[place].options.include:
                # With the posterior's own T, T_c and c, samples and seed it is the score of outliers too.
                entry["outlier"] = served.outlier(total_information(entry))
        answers[place] = _named(served.classes, answers[place], of_labels=served.of_labels)
    return answers


def _is_in_graph(served: Served, options: AnswerOptions) -> bool:
    known = {"outlier", "input"} if served.score_samples == SAMPLES else {"input"}
    is_plain = options.level == LEVEL and options.thresholds is None and options.include <= known
    return is_plain and is_usual(served, options)


def total_information(entry: Mapping[str, Any]) -> float:
    """The mutual information of an answer; of several labels the sum over them."""
    information = entry["mutual_information"]
    return sum(information) if isinstance(information, list) else information


def _columns(found: Prediction, level: float) -> Columns:
    """What each answer has, input by input."""
    lower, upper = found.interval(level)
    is_decided = not isinstance(found, LabelPrediction)
    return {
        **({"label": found.label.tolist(), "confidence": found.confidence.tolist()} if is_decided else {}),
        "entropy": found.entropy.tolist(),
        "mutual_information": found.mutual_information.tolist(),
        "pmf": found.pmf.tolist(),
        "std": found.std.tolist(),
        "standard_error": found.standard_error.tolist(),
        "lower": lower.tolist(),
        "upper": upper.tolist(),
    }


def _named(classes: Sequence[str], entries: Answer, *, of_labels: bool) -> Answer:
    """With the name of the most likely class, or with those of all labels and of the ones that are likely true."""
    if of_labels:
        return [
            {
                "names": list(classes),
                "likely": [name for name, f in zip(classes, entry["pmf"], strict=True) if f > 0.5],
                **entry,
            }
            for entry in entries
        ]
    return [{"class": classes[entry["label"]], **entry} for entry in entries]


def _draws_parameters(served: Served, options: AnswerOptions) -> bool:
    """Whether `predict` would draw parameters for as many samples, and the request does not ask for P^g itself."""
    return "logits" not in options.include and served.draws_parameters(options.samples)


def _logits(served: Served, works: Sequence[Predict], places: Sequence[int]) -> dict[int, LogitGaussian]:
    """The logits of some of the works without T and T_c, by one run of the network."""
    if not places:
        return {}
    together = served.plain_logits(torch.cat([works[place].x for place in places]))
    parts, start = {}, 0
    for place in places:
        parts[place] = together[start : start + len(works[place].x)]
        start += len(works[place].x)
    return parts


def with_stored_samples(prediction: Prediction) -> Prediction:
    """The same prediction with its samples stored, if they are few: otherwise each statistic would redraw them."""
    sampler = prediction.sampler
    if prediction.pmf.numel() * sampler.samples > _STORED or sampler.draws != "random":
        return prediction
    stored = GivenSampler(sampler.block(0, sampler.rows), sampler.kind)
    return type(prediction)(prediction.pmf, stored, prediction.jitter)


@dataclass(frozen=True, eq=False)
class Result:
    """The logits and the PMFs of some inputs."""

    gaussian: LogitGaussian
    prediction: Prediction

    def described(
        self,
        classes: Sequence[str],
        options: AnswerOptions,
        served: Served | None = None,
        outlier_scores: Tensor | None = None,
    ) -> Answer:
        """One mapping per input, ready for JSON; `outlier_scores` come from `Served.outlier_scores`."""
        prediction, include = self.prediction, options.include
        columns = _columns(prediction, options.level)
        of_labels = not self.gaussian.kind.has_gauge
        if prediction.sampler.samples == 1:
            # JSON cannot express the NaN of one sample.
            columns["standard_error"] = [None] * len(prediction)
        if options.thresholds is not None:
            columns["risk"] = prediction.risk(_limit(options.thresholds, prediction.pmf)).tolist()
        if "covariance" in include:
            columns["covariance"] = prediction.covariance.tolist()
        if include & {"logits", "points"}:
            if "logits" in include:
                # Of several labels nothing is a common shift.
                shown = self.gaussian.rounded() if of_labels else self.gaussian.rounded().centered()
                pairs = zip(shown.mean.tolist(), shown.covariance.tolist(), strict=True)
                columns["logits"] = [{"mean": mean, "covariance": covariance} for mean, covariance in pairs]
            if "points" in include:
                columns["points"] = _points(self.gaussian, prediction.pmf, options)
        if served is not None and outlier_scores is not None:
            columns["outlier"] = [served.outlier(value) for value in outlier_scores.tolist()]
        names = list(columns)
        entries = [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return _named(classes, entries, of_labels=of_labels)


def _limit(thresholds: float | tuple[float, ...], like: Tensor) -> float | Tensor:
    if isinstance(thresholds, tuple):
        if len(thresholds) != like.shape[1]:
            raise ArgumentError(
                f"There are {len(thresholds)} risk thresholds; expected one, or one for each of the {like.shape[1]} "
                "classes."
            )
        return torch.tensor(thresholds, dtype=like.dtype, device=like.device)
    return thresholds


def leading(pmf: Float[Tensor, "B M"], mean: Float[Tensor, "B M"]) -> Int[Tensor, "B 2"]:
    """The most probable class and the next one: if all others have less than 1 %, that of the largest mean logit."""
    first = pmf.argmax(1, keepdim=True)
    others = pmf.scatter(1, first, -1.0)
    nearest = mean.scatter(1, first, -torch.inf).argmax(1, keepdim=True)
    second = torch.where(others.amax(1, keepdim=True) < _RARE, nearest, others.argmax(1, keepdim=True))
    return torch.cat([first, second], 1)


def _points(gaussian: LogitGaussian, pmf: Tensor, options: AnswerOptions) -> list[dict[str, Any]]:
    """The first draws of the logits of the two leading classes, centred over all classes: the same draws as the PMF."""
    # All draws, not just the first few: another number of samples gives other draws.
    root = gaussian.sampling_root()
    normal = root.draws(options.samples, options.seed, gaussian.mean)[:, :POINTS]
    leaders = leading(pmf, gaussian.mean)
    points = []
    for row, pair in enumerate(leaders.tolist()):
        logits = gaussian.mean[row][:, None] + root.spread(slice(row, row + 1), normal)[0]
        logits = logits - logits.mean(0, keepdim=True)
        points.append({"classes": pair, "logits": logits[pair].T.tolist()})
    return points


def _result(gaussian: LogitGaussian, options: AnswerOptions) -> Result:
    return Result(gaussian, with_stored_samples(gaussian.predict(options.samples, options.seed)))


def _calibration(served: Served, options: AnswerOptions) -> Calibration:
    return served.calibration(options.temperature, options.covariance_scale, options.softening)


def _fused(work: FuseFrames | FuseGaussians) -> dict[str, Any]:
    options = work.options
    if isinstance(work, FuseGaussians):
        classes = work.classes
        together = errbar.fuse(work.gaussians)
        single = [_result(gaussian, options).described(classes, options)[0] for gaussian in work.gaussians]
        fused = _result(together, options).described(classes, options)[0]
        return {"fused": fused, "single": single, "independent": None, "rank": None}
    classes = work.served.classes
    calibration = _calibration(work.served, options)
    if isinstance(work.served.posterior, errbar.FusedClassifier):
        return _fused_frames(work, calibration)
    if work.joint and work.served.of_labels:
        raise ArgumentError(
            "The posterior is of outputs='labels', and frames are fused with the covariance between them for one of M "
            "classes only; expected joint=false, which weights the frames by their precisions."
        )
    posterior = work.served.posterior.with_calibration(**vars(calibration))
    each = posterior.unrounded_logits(work.x)
    if not work.joint:
        if work.served.of_labels:
            together = errbar.fuse([each[frame : frame + 1] for frame in range(len(work.x))])
        else:
            together = errbar.Track(posterior).add(each).logits
        return {
            "fused": _result(together, options).described(classes, options)[0],
            "single": _result(each, options).described(classes, options),
            "independent": None,
            "rank": None,
        }
    together = errbar.fuse_frames(posterior.joint_logits(work.x))
    rounded = each.rounded()
    naive = errbar.fuse([rounded[frame : frame + 1] for frame in range(len(work.x))])
    return {
        "fused": _result(together, options).described(classes, options)[0],
        "single": _result(each, options).described(classes, options),
        "independent": _result(naive, options).described(classes, options)[0],
        "rank": together.rank,
    }


def _fused_frames(work: FuseFrames, calibration: Calibration) -> dict[str, Any]:
    """Frames that several networks saw, weighted by their precisions as a track does it.

    T and q are the same for all frames, so the weights are those of N(ĝ, P) before them, also where q is zero.
    """
    if work.joint:
        raise ArgumentError(
            "The posterior is a fused classifier, whose networks have no covariance between frames in common; expected "
            "joint=false, which weights the frames by their precisions."
        )
    options, classes = work.options, work.served.classes
    plain = work.served.plain_logits(work.x)
    if bool((plain.variance > 0).any()):
        together = errbar.fuse([plain[frame : frame + 1] for frame in range(len(work.x))])
    else:
        # The mean of the networks' logits has no covariance, and nothing to weigh frames by.
        together = LogitGaussian(plain.mean.mean(0, keepdim=True), plain[:1].form)
    return {
        "fused": _result(together.calibrated(calibration), options).described(classes, options)[0],
        "single": _result(plain.calibrated(calibration), options).described(classes, options),
        "independent": None,
        "rank": None,
    }


def _fused_posteriors(work: FusePosteriors) -> Answer:
    options, classes = work.options, work.members[0].classes
    gaussians = [
        member.calibrated(member.plain_logits(work.x), _calibration(member, options)).rounded()
        for member in work.members
    ]
    fused = _result(errbar.fuse(gaussians), options).described(classes, options)
    single = [_result(gaussian, options).described(classes, options) for gaussian in gaussians]
    return [
        {"fused": one, "single": [source[row] for source in single], "independent": None, "rank": None}
        for row, one in enumerate(fused)
    ]
