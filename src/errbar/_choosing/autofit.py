"""`autofit`: the best of several posteriors by cross-validation, and none that is worse than temperature scaling.

For each candidate: one pass over the training data, one over the held-out data for several priors at once, and then all
links and folds from the same logit Gaussians. `choice.best_trial` is the rule, docs/design.md its reasons.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from errbar._base.execution import plain_execution
from errbar._base.memory import usable_bytes
from errbar._base.progress import note
from errbar._calibration.folds import Groups, read_folds, require_folds
from errbar._calibration.held_out import HeldOut, gathered, held_out_of_gaussians, labels_for
from errbar._calibration.overlap import Overlap
from errbar._choosing.candidates import (
    Candidate,
    listed_candidates,
    question_of,
    require_time_for_one,
    same_everywhere,
)
from errbar._choosing.choice import Choice, Row, Trial, best_trial, reason_for, reason_without, scored_row
from errbar._choosing.choose_prior import PRECISIONS as EVIDENCE_PRECISIONS
from errbar._choosing.choose_prior import prior_by_evidence
from errbar._choosing.deadline import PLAN_ERROR, Deadline, Pace, TimeIsUpError
from errbar._choosing.last_fit import LastFit
from errbar._choosing.links import Judged, Scores, judged, plain_softmax, scaled_softmax
from errbar._curvature.task import Task
from errbar._curvature.workload import by_device
from errbar._distributed.shards import opened
from errbar._distributed.team import Team, team_of
from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import require_seed
from errbar._model.batch import Batch, Unpack, pieces
from errbar._model.network import Output
from errbar._model.outputs import require_classes_alone
from errbar._model.reading_order import in_order
from errbar._planning.choice import cost_of
from errbar._posterior.collect import collect, collect_several
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior, condition, logits_of_each
from errbar._posterior.prior import Prior
from errbar._posterior.pushing import affordable_draws, keeps_draws, require_room
from errbar.errors import ArgumentError, CalibrationWarning, CovarianceError, DataError, StructureNotice

# The priors that the held-out data choose among: decades, because T_c makes up for what lies between.
PRECISIONS = tuple(10.0**step for step in range(-2, 5))
_FEW_PRECISIONS = (1.0, 100.0)
# A factorisation of more products in float64 is not repeated for many priors: a second or two, but by sizes, so that
# the same call tries the same priors again. Nor are the draws of more classes held for many.
_MOST_PRODUCTS, _FEW_CLASSES = {"cpu": 5e10, "cuda": 1e13}, 100
_KEPT_DRAWS = 1000
# Inputs whose prediction is timed.
_TIMED_INPUTS = 32
# Factorisations for the prior by the evidence among few, and the share of the time that more may take.
_FEWEST_CONDITIONS, _MOST_CONDITIONS, _PRIOR_SHARE = 4, 30, 0.05
_LINK_NAMES = {2: "T, T_c", 3: "T, T_c, c"}

_NO_ROOT = "The covariance of the logits is not positive semi-definite."


def autofit(
    model: nn.Module,
    train: Any,
    held_out: Any,
    *,
    candidates: Sequence[Any] | Mapping[str, Any] | None = None,
    memory: int | None = None,
    seconds: float | None = None,
    folds: int = 5,
    groups: Groups | None = None,
    seed: int = 0,
    unpack: Unpack | None = None,
    output: Output = None,
    outputs: str = "classes",
    group: Any = None,
    progress: bool = False,
) -> Choice:
    """The best error bars for a network: several posteriors are fitted, calibrated and compared on held-out data.

    Tried are the last layer, the last two, the last layer with all vectors (norms and biases), and the whole network
    with `kron` and `lowrank`: each with the prior by the evidence and by the held-out NLL, and each with T and T_c, and
    with a softening besides. All of these are fitted on some folds and scored on the others, paired with temperature
    scaling. What is not as good as that is never chosen; of what is equally good, the one with the most parameters
    in an exact structure is, because inputs that are unlike the held-out data gain from it. The posterior of the result
    is calibrated on all held-out data.

    Args:
        model: a trained classifier that returns logits; never modified.
        train: its training data, as `collect` takes them. An iterator is read into memory. None if all candidates are
            Information.
        held_out: data with labels that were not used for training; read once for each candidate.
        candidates: what to try instead: a list of mappings of keywords of `collect`, or of Information that was
            collected already (over several sites, or for another choice); or a mapping of labels to these.
        memory: bytes that a fit may take; by default nine tenths of what is available.
        seconds: stop after this time with the best so far. `Choice.not_tried` says what was left out.
        folds: of the cross-validation.
        groups: one value for each held-out sample, or a function from a batch to them: samples with equal values
            (frames of one track, pictures of one patient) stay in one fold, and count as one for standard errors.
        seed: of the folds and of the draws.
        unpack: as in `collect`.
        output: as in `collect`.
        outputs: as in `collect`; only "classes" yet.
        group: as in `collect`; all ranks choose the same.
        progress: show progress with the time left.
    """
    team = team_of(group)
    deadline = Deadline(_require_seconds(seconds), team.is_alone)
    listed = listed_candidates(candidates)
    require_classes_alone(outputs, "autofit")
    folds, seed = require_folds(folds), require_seed(seed)
    train_data = list(train) if isinstance(train, Iterator) else train
    held_out_data = in_order(held_out)
    question = question_of(model, train_data, listed, memory, deadline, unpack, output)
    device = next(model.parameters()).device
    search = _Search(team, train_data, held_out_data, device, unpack, deadline, seed, progress and team.leads)
    search.samples = question.samples
    search.groups, search.folds = read_folds(team, held_out_data, unpack, groups, folds, seed)
    question = replace(question, held_out=len(search.groups))
    tried, left_out = team.together(lambda: question.candidates(listed))
    tried, left_out = same_everywhere(team, tried, left_out)
    if not tried:
        raise DataError("No candidate can be tried. " + " ".join(left_out))
    if deadline.seconds is not None:
        require_time_for_one(tried, question.samples or 1, deadline.seconds)
    search.try_all(tried)
    if not search.tried:
        raise CovarianceError("No candidate has a covariance that can be used. " + " ".join(search.not_tried))
    return search.choice(left_out)


def _require_seconds(seconds: object) -> float | None:
    if seconds is None:
        return None
    try:
        number = float(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 < number < float("inf"):
        raise ArgumentError(f"seconds is {seconds!r}; expected a positive number, or None for no limit.")
    return number


@dataclass(frozen=True, eq=False)
class _Tried:
    """A row, the posterior that it is of, not yet calibrated, and its held-out Gaussians."""

    candidate: Candidate
    trial: Trial
    names: tuple[str, ...]
    posterior: Posterior
    held_out: HeldOut


@dataclass(eq=False)
class _Search:
    """What has been tried so far."""

    team: Team
    train: Any
    held_out: Any
    device: torch.device
    unpack: Unpack | None
    deadline: Deadline
    seed: int
    progress: bool
    # Of the training data, where that is known before they were read.
    samples: int | None = None
    tried: list[_Tried] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    baselines: tuple[Row, Row] | None = None
    scaling: tuple[Calibration, Scores] | None = None
    cheapest: tuple[Posterior, HeldOut] | None = None
    groups: Int[Tensor, "N"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    folds: list[Int[Tensor, "n"]] = field(default_factory=list)
    # Seconds that all links and folds of a candidate took.
    judging: float = 0.0

    # ------------------------------------------------------------------------------------------------- trying

    def try_all(self, candidates: Sequence[Candidate]) -> None:
        """In passes of as many candidates as memory and time allow."""
        waiting = list(candidates)
        while waiting:
            places = self.team.broadcast(self._together(waiting))
            if not places:
                self.not_tried += [self._too_long(candidate) for candidate in waiting]
                return
            now = [waiting[place] for place in places]
            waiting = [candidate for place, candidate in enumerate(waiting) if place not in places]
            try:
                self._try(now)
            except TimeIsUpError as error:
                if not self.tried:
                    raise ArgumentError(
                        f"seconds is {self.deadline.seconds:g}, and that was not enough for a single candidate "
                        f"({now[0].label}); expected more time, or fewer data."
                    ) from None
                self.not_tried += [f"{c.name}: {error}" for c in now if not self._has(c)]

    def _has(self, candidate: Candidate) -> bool:
        return any(tried.candidate is candidate for tried in self.tried)

    def _samples(self) -> float:
        return self.cheapest[0].information.n_samples if self.cheapest else self.samples or 0.0

    def _after_fit(self, candidate: Candidate) -> float:
        """Seconds of all that follows a fit, by the plan, with one prior alone."""
        once = _FEWEST_CONDITIONS * candidate.once_seconds
        return once + candidate.predict_seconds(len(self.groups)) + self.judging

    def _expected(self, candidate: Candidate) -> float:
        """Seconds of a fit and of all that follows it, by the plan."""
        return candidate.fit_seconds(self._samples()) + self._after_fit(candidate)

    def _may_be_in_time(self, candidate: Candidate) -> bool:
        """The plan may be wrong, and the pace of a pass soon tells; but nothing ends a factorisation."""
        sure = _FEWEST_CONDITIONS * candidate.once_seconds + self.judging
        return sure + (self._expected(candidate) - sure) / PLAN_ERROR <= self.deadline.left()

    def _together(self, waiting: Sequence[Candidate]) -> list[int]:
        """The places of the candidates that share the next pass; none if there is no time for any of them.

        Within a limit it is one alone, the first for which there is time: what comes after a long fit may be quick.
        """
        if self.deadline.seconds is not None:
            in_time = (place for place, candidate in enumerate(waiting) if self._may_be_in_time(candidate))
            return list(islice(in_time, 1)) if self.tried else [0]
        places: list[int] = []
        room, used = usable_bytes(self.device), 0
        for place, candidate in enumerate(waiting):
            used += candidate.fit_bytes
            if places and used > room:
                break
            places.append(place)
        return places

    def _too_long(self, candidate: Candidate) -> str:
        return (
            f"{candidate.name}: it would take about {self._expected(candidate):.0f} s, and "
            f"{max(self.deadline.left(), 0):.0f} s were left."
        )

    def _try(self, candidates: Sequence[Candidate]) -> None:
        names = " and ".join(f"{candidate.label} ({candidate.structure})" for candidate in candidates)
        note(f"Trying {names}", enabled=self.progress)
        try:
            found = self._collected(candidates)
        except torch.OutOfMemoryError:
            # The plan of the memory was wrong, or another process has taken some of it since.
            if len(candidates) > 1:
                for candidate in candidates:
                    self._try([candidate])
            else:
                self.not_tried.append(f"{candidates[0].name}: the memory of the device was not enough.")
            return
        for candidate, (information, seconds) in zip(candidates, found, strict=True):
            try:
                self._judge(candidate, information, seconds)
            except (CovarianceError, torch.OutOfMemoryError) as error:
                self.not_tried.append(f"{candidate.name}: {_first_sentence(error)}")

    def _collected(self, candidates: Sequence[Candidate]) -> list[tuple[Information, float]]:
        """The information of each, and the seconds that it took."""
        missing = [candidate for candidate in candidates if candidate.request is not None]
        found = iter(self._collected_of(missing) if missing else [])
        return [next(found) if one.information is None else (one.information, 0.0) for one in candidates]

    def _collected_of(self, candidates: Sequence[Candidate]) -> list[tuple[Information, float]]:
        requests = [candidate.request for candidate in candidates if candidate.request is not None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StructureNotice)
            if self.team.is_alone:
                # Within a limit there is one alone.
                at_once = self.deadline.at_once(candidates[0].sample_seconds)
                pace = Pace(self.deadline, self._samples() or None, self._after_fit(candidates[0]) / PLAN_ERROR)
                tick = pace if self.tried else pace.begin
                return collect_several(requests, self.train, progress=self.progress, tick=tick, at_once=at_once)
            results = []
            for request in requests:
                begin = time.monotonic()
                information = collect(
                    request.model,
                    self.train,
                    last_layers=request.last_layers,
                    parameters=request.parameters,
                    fisher=request.fisher,
                    draws=request.draws,
                    structure=request.structure,
                    rank=request.rank,
                    precision=request.precision,
                    unpack=request.unpack,
                    output=request.output,
                    group=self.team.group,
                    progress=self.progress,
                )
                results.append((information, time.monotonic() - begin))
            return results

    def _judge(self, candidate: Candidate, information: Information, seconds: float) -> None:
        """All priors, links and folds of one candidate."""
        begin = time.monotonic()
        by_evidence, others = self._posteriors(information)
        condition_seconds = (time.monotonic() - begin) / (len(others) + 1)
        posteriors, variants, microseconds = self._variants(candidate, [by_evidence, *others])
        begin = time.monotonic()
        if self.scaling is None:
            self._judge_baselines(variants[0])
        kind = "evidence" if information.log_likelihood is not None else "default"
        # By parameters, not by seconds, which differ from call to call.
        if self.cheapest is None or information.n_parameters < self.cheapest[0].information.n_parameters:
            self.cheapest = posteriors[0], variants[0]
        own = int(posteriors[0] is by_evidence)
        for prior_by, first, last in ((kind, 0, own), ("nll", own, len(posteriors))):
            if first == last:
                continue
            for link in self._judged(variants[first:last]):
                if _repeats(link):
                    continue
                index = first + link.variant
                row = self._row(candidate, posteriors[index], link, prior_by, seconds + condition_seconds, microseconds)
                self.tried.append(
                    _Tried(candidate, Trial(row, link.scores.losses), link.names, posteriors[index], variants[index])
                )
        self.judging = max(self.judging, time.monotonic() - begin)

    def _judged(self, variants: Sequence[HeldOut]) -> list[Judged]:
        def run() -> list[Judged] | None:
            if not self.team.leads:
                return None
            with plain_execution(variants[0].mean.device), warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)
                return judged(variants, self.folds, self.seed)

        result: list[Judged] = self.team.broadcast(self.team.together(run))
        return result

    def _posteriors(self, information: Information) -> tuple[Posterior, list[Posterior]]:
        """With the prior by the evidence (1 without labels), and with those that held-out data may choose."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            begin = time.monotonic()
            first = condition(information, Prior(1.0))
            once = time.monotonic() - begin
            # Less than a factorisation is no time for another; the clock decides within a limit alone.
            tick = partial(self.deadline.tick, once)
            is_quick = self._is_quick(information) and self._has_time(_MOST_CONDITIONS * once)
            prior = Prior(1.0)
            if information.log_likelihood is not None:
                prior = prior_by_evidence(information, EVIDENCE_PRECISIONS if is_quick else _FEW_PRECISIONS, tick)
            by_evidence = condition(information, prior)
            others = []
            for precision in PRECISIONS if is_quick else _FEW_PRECISIONS:
                if not self._has_time(once):
                    break
                try:
                    other = first if precision == 1 else condition(information, Prior(precision))
                except CovarianceError:
                    continue
                if other.jitter == 0:
                    others.append(other)
        return by_evidence, others

    def _has_time(self, needed: float) -> bool:
        """Whether so many seconds are a small part of what is left."""
        return not self.deadline.decides or needed <= _PRIOR_SHARE * self.deadline.left()

    def _is_quick(self, information: Information) -> bool:
        """Whether there is time for many priors. What came from a file has no plan, and counts as exact."""
        cost = cost_of(information.task)
        products = float(information.n_parameters) ** 3 if cost is None else cost.once_products - cost.first_products
        return information.n_classes <= _FEW_CLASSES and products <= by_device(_MOST_PRODUCTS, self.device.type)

    def _variants(
        self, candidate: Candidate, posteriors: list[Posterior]
    ) -> tuple[list[Posterior], list[HeldOut], float]:
        """The held-out Gaussians of each posterior from one pass, and the microseconds for an input of one of them.

        A posterior whose covariance has no root left after rounding (a prior that is too weak) is dropped. Where there
        is no time for all, so are most of those that the held-out data would choose among.
        """
        microseconds = 0.0
        pace = Pace(self.deadline, len(self.groups), self.judging)

        def read() -> list[HeldOut | CovarianceError] | None:
            nonlocal microseconds, posteriors
            parts: list[list[LogitGaussian]] = [[] for _ in posteriors]
            labels: list[Tensor] = []
            for batch in self._parts(stream, task):
                needed = pace.needed()
                if needed is not None and needed > self.deadline.left() and len(posteriors) > 1:
                    posteriors, parts = fewer(posteriors, parts)
                    pace.again()
                    begin_part = pace.begin
                else:
                    begin_part = pace if self.tried else pace.begin
                begin_part(len(batch))
                for part, gaussian in zip(parts, self._gaussians(posteriors, batch), strict=True):
                    part.append(gaussian)
                labels.append(labels_for(parts[0][-1], batch))
                few = batch.rows(0, min(len(batch), _TIMED_INPUTS))
            if labels:
                # Of one posterior by itself: those of a pass share their derivatives.
                begin = time.perf_counter()
                with suppress(CovarianceError):  # of those without a root, which are dropped below
                    self._gaussians(posteriors[:1], few)[0].predict()
                microseconds = 1e6 * (time.perf_counter() - begin) / len(few)
            return [_held_out_or_error(part, labels) for part in parts] if labels else None

        def fewer(
            posteriors: list[Posterior], parts: list[list[LogitGaussian]]
        ) -> tuple[list[Posterior], list[list[LogitGaussian]]]:
            few = [0, *(n for n, one in enumerate(posteriors) if n and one.prior.precision in _FEW_PRECISIONS)]
            kept = few if len(few) < len(posteriors) else [0]
            what = "the prior that the held-out data want" if kept == [0] else "all priors but a few"
            self.not_tried.append(f"{candidate.name}, {what}: there was no time for it.")
            return [posteriors[place] for place in kept], [parts[place] for place in kept]

        stream = opened(self.held_out, self.unpack, self.team, title="Held-out data", progress=self.progress)
        overlap = Overlap(posteriors[0].information)
        if not self.cheapest:
            stream = overlap.watching(stream)
        task = posteriors[0].information.task
        parts = self.team.together(read)
        own = [isinstance(part, HeldOut) for part in parts] if parts else [True] * len(posteriors)
        usable = [all(flags) for flags in zip(*self.team.exchange(own), strict=True)]
        kept = [posterior for posterior, is_usable in zip(posteriors, usable, strict=True) if is_usable]
        if not kept:
            raise next((part for part in parts or () if isinstance(part, CovarianceError)), CovarianceError(_NO_ROOT))
        each = zip(parts, usable, strict=True) if parts else None
        good = None if each is None else [part for part, ok in each if ok and isinstance(part, HeldOut)]
        variants = gathered(good, task, self.team, affordable_draws(task.n_classes, _KEPT_DRAWS))
        if not self.cheapest:
            overlap.warn(self.team, stacklevel=6)
        elif not torch.equal(self.cheapest_held_out.labels, variants[0].labels):
            raise DataError(
                "The held-out data came in another order than before; expected the same samples in the same order each "
                "time they are read. Pass a Dataset, a list of batches, or a DataLoader that does not shuffle."
            )
        return kept, [replace(one, watch=self.deadline.tick) for one in variants], microseconds

    def _parts(self, stream: Iterator[Batch], task: Task) -> Iterator[Batch]:
        """The batches; in parts within a limit, but for draws of the parameters, which each part makes again."""
        if keeps_draws(task, affordable_draws(task.n_classes, _KEPT_DRAWS)):
            return (part for whole in stream for part in pieces(whole, self.deadline.at_once()))
        return self.deadline.parts(stream)

    def _gaussians(self, posteriors: Sequence[Posterior], batch: Batch) -> list[LogitGaussian]:
        """Without calibration; by draws of the parameters where there are so many classes that this is quicker."""
        task = posteriors[0].information.task
        draws = affordable_draws(task.n_classes, _KEPT_DRAWS)
        if keeps_draws(task, draws):
            # All of them are held for all inputs.
            require_room(task, (len(posteriors) - 1) * len(self.groups), len(self.groups), draws)
            return [posterior.uncalibrated().drawn_logits(batch, draws, self.seed) for posterior in posteriors]
        return logits_of_each(posteriors, batch)

    def _judge_baselines(self, held_out: HeldOut) -> None:
        calibration, scores = scaled_softmax(held_out, self.folds)
        self.scaling = calibration, scores
        plain = plain_softmax(held_out)
        rows = []
        for name, link, at, own in (
            ("softmax", "", Calibration(1.0, 0.0), plain),
            ("T alone", "T", calibration, scores),
        ):
            rows.append(scored_row(name, link, at, own, scores, self.groups))
        self.baselines = rows[0], rows[1]

    def _row(
        self,
        candidate: Candidate,
        posterior: Posterior,
        link: Judged,
        prior_by: str,
        seconds: float,
        microseconds: float,
    ) -> Row:
        assert self.scaling is not None
        row = scored_row(
            candidate.label, _LINK_NAMES[len(link.names)], link.calibration, link.scores, self.scaling[1], self.groups
        )
        precision = posterior.prior.precision
        return replace(
            row,
            structure=posterior.information.structure,
            fisher=candidate.fisher,
            n_parameters=posterior.information.n_parameters,
            exact=candidate.exact,
            prior=float(precision),  # type: ignore[arg-type]
            prior_by=prior_by,
            seconds=seconds,
            microseconds=microseconds,
            bytes=candidate.posterior_bytes,
        )

    # ----------------------------------------------------------------------------------------------- choosing

    def choice(self, left_out: Sequence[str]) -> Choice:
        assert self.scaling is not None
        assert self.baselines is not None
        assert self.cheapest is not None
        scaling_calibration, scores = self.scaling
        trials = [tried.trial for tried in self.tried]
        best = best_trial(trials, scores.losses, self.groups)
        rows = tuple(sorted((trial.row for trial in trials), key=lambda row: row.nll))
        if best is None:
            posterior, found = self.cheapest[0], self._final(self._last_fit(self.cheapest_held_out).largest_covariance)
            reason, at = reason_without(rows, found), found or scaling_calibration
        else:
            tried = next(tried for tried in self.tried if tried.trial is best)
            fit = self._last_fit(tried.held_out)
            posterior = tried.posterior
            at = self._final(partial(fit.near, tried.names, best.row)) or scaling_calibration
            reason = reason_for(best.row, rows)
        return Choice(
            posterior=posterior.with_calibration(**at.described()),
            rows=rows,
            baselines=self.baselines,
            chosen=None if best is None else best.row,
            reason=reason,
            not_tried=(*left_out, *self.not_tried),
            temperature_scaling=self.cheapest[0].with_calibration(**scaling_calibration.described()),
        )

    def _last_fit(self, held_out: HeldOut) -> LastFit:
        return LastFit(held_out, self.groups, self.deadline, self.seed)

    @property
    def cheapest_held_out(self) -> HeldOut:
        assert self.cheapest is not None
        return self.cheapest[1]

    def _final(self, fitted: Callable[[], Calibration | None]) -> Calibration | None:
        """A calibration that the first rank computes for all."""
        assert self.cheapest is not None

        def run() -> Calibration | None:
            if not self.team.leads:
                return None
            with plain_execution(self.cheapest_held_out.mean.device):
                return fitted()

        result: Calibration | None = self.team.broadcast(self.team.together(run))
        return result


def _held_out_or_error(
    gaussians: Sequence[LogitGaussian], labels: Sequence[Int[Tensor, "B"]]
) -> HeldOut | CovarianceError:
    try:
        return held_out_of_gaussians(gaussians, labels)
    except CovarianceError as error:
        return error


def _repeats(link: Judged) -> bool:
    """Whether a link with a softening came out without one, which is the link without it again."""
    return "softening" in link.names and link.calibration.softening == 0


def _first_sentence(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "the memory of the device was not enough."
    return str(error).split(": ")[0].split(". ")[0].rstrip(".") + "."
