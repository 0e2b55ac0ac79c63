"""`autofit`: the best of several posteriors by cross-validation, and none that is worse than temperature scaling.

For each candidate: one pass over the training data, one over the held-out data for several priors at once, and then all
links and folds from the same logit Gaussians. `choice.best_trial` is the rule, docs/design.md its reasons.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from errbar._calibration.search import calibration_near, largest_covariance
from errbar._choosing.candidates import Candidate, Listed, Question, listed_candidates
from errbar._choosing.choice import Choice, Row, Trial, best_trial, is_as_good, reason_for, reason_without, scored_row
from errbar._choosing.choose_prior import PRECISIONS as EVIDENCE_PRECISIONS
from errbar._choosing.choose_prior import prior_by_evidence
from errbar._choosing.links import Judged, Scores, judged, plain_softmax, scaled_softmax
from errbar._curvature.workload import by_device
from errbar._distributed.shards import opened
from errbar._distributed.team import Team, team_of
from errbar._distributions.calibration import Calibration
from errbar._distributions.logits import LogitGaussian
from errbar._distributions.sampling import require_seed
from errbar._model.batch import Batch, Unpack, count_batches, in_order, pieces, with_raw
from errbar._model.network import Output
from errbar._model.outputs import require_classes_alone
from errbar._planning.choice import cost_of
from errbar._posterior.collect import Request, collect, collect_several
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
_FINAL_DRAWS, _KEPT_DRAWS = 1000, 1000
# The share of the time that is left for the last fit.
_SHARE_AT_END = 0.08
# Samples between two looks at the clock, where the time is limited and batches are larger.
_AT_ONCE = 256
_LINK_NAMES = {2: "T, T_c", 3: "T, T_c, c"}

_NO_ROOT = "The covariance of the logits is not positive semi-definite."


class _TimeIsUpError(Exception):
    """The limit of `seconds` is reached."""


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
    listed = listed_candidates(candidates)
    require_classes_alone(outputs, "autofit")
    limit = _require_seconds(seconds)
    folds, seed = require_folds(folds), require_seed(seed)
    train_data = list(train) if isinstance(train, Iterator) else train
    held_out_data = in_order(held_out)
    question = _question(model, train_data, listed, memory, limit, unpack, output)
    device = next(model.parameters()).device
    search = _Search(team, train_data, held_out_data, device, unpack, limit, seed, progress and team.leads)
    search.groups, search.folds = read_folds(team, held_out_data, unpack, groups, folds, seed)
    question = replace(question, held_out=len(search.groups))
    tried, left_out = team.together(lambda: question.candidates(listed))
    tried, left_out = _same_everywhere(team, tried, left_out)
    if not tried:
        raise DataError("No candidate can be tried. " + " ".join(left_out))
    if limit is not None:
        _require_time_for_one(tried, question.samples or 1, limit)
    search.try_all(tried)
    if not search.tried:
        raise CovarianceError("No candidate has a covariance that can be used. " + " ".join(search.not_tried))
    return search.choice(left_out)


def _question(
    model: nn.Module,
    train: Any,
    listed: tuple[Listed, ...] | None,
    memory: int | None,
    seconds: float | None,
    unpack: Unpack | None,
    output: Output,
) -> Question:
    if listed is not None and all(isinstance(candidate, Information) for _, candidate in listed):
        return Question(model, None, None, memory, seconds, unpack, output)
    if train is None:
        raise DataError("The training data are None; expected batches, because a candidate is yet to be collected.")
    example, first = next(with_raw(train, unpack), (None, None))
    if first is None:
        raise DataError("The training data are empty: expected at least one batch.")
    return Question(model, example, _count(train, first), memory, seconds, unpack, output)


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


def _require_time_for_one(candidates: Sequence[Candidate], samples: float, limit: float) -> None:
    cheapest = min(candidates, key=lambda candidate: candidate.fit_seconds(samples))
    if cheapest.fit_seconds(samples) > limit:
        raise ArgumentError(
            f"seconds is {limit:g}, and the cheapest candidate alone ({cheapest.label}) takes about "
            f"{cheapest.fit_seconds(samples):.2g} s to fit; expected more time, or fewer training data."
        )


def _count(data: Any, first: Batch) -> int | None:
    number = count_batches(data)
    return None if number is None else number * len(first)


def _same_everywhere(team: Team, candidates: list[Candidate], left_out: list[str]) -> tuple[list[Candidate], list[str]]:
    """The candidates of the first rank, whose times and memory decide for all."""
    if team.is_alone:
        return candidates, left_out
    facts = [(c.label, c.structure, c.fisher) for c in candidates]
    chosen, left_out = team.broadcast((facts, left_out))
    own = {(c.label, c.structure): c for c in candidates}
    same = []
    for label, structure, fisher in chosen:
        if (label, structure) in own:
            candidate = own[label, structure]
            request = None if candidate.request is None else replace(candidate.request, fisher=fisher)
            same.append(replace(candidate, fisher=fisher, request=request))
    return same, left_out


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
    seconds: float | None
    seed: int
    progress: bool
    begin: float = field(default_factory=time.monotonic)
    tried: list[_Tried] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    baselines: tuple[Row, Row] | None = None
    scaling: tuple[Calibration, Scores] | None = None
    cheapest: tuple[Posterior, HeldOut] | None = None
    groups: Int[Tensor, "N"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    folds: list[Int[Tensor, "n"]] = field(default_factory=list)
    # Seconds that judging a candidate took, beyond its fit.
    judging: float = 0.0

    def left(self) -> float:
        """Seconds until the search must end, so that the last fit is done in time."""
        if self.seconds is None:
            return float("inf")
        return self.begin + (1 - _SHARE_AT_END) * self.seconds - time.monotonic()

    def tick(self) -> None:
        # Several ranks decide together, between candidates.
        if self.team.is_alone and self.left() < 0:
            raise _TimeIsUpError

    def _at_once(self) -> int | None:
        """Samples between two looks at the clock; None for whole batches."""
        return None if self.seconds is None else _AT_ONCE

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
            except _TimeIsUpError:
                if not self.tried:
                    raise ArgumentError(
                        f"seconds is {self.seconds:g}, and that was not enough for a single candidate "
                        f"({now[0].label}); expected more time, or fewer data."
                    ) from None
                self.not_tried += [f"{c.name}: the time was up." for c in now if not self._has(c)]

    def _has(self, candidate: Candidate) -> bool:
        return any(tried.candidate is candidate for tried in self.tried)

    def _samples(self) -> float:
        return self.cheapest[0].information.n_samples if self.cheapest else 0.0

    def _expected(self, candidate: Candidate) -> float:
        """Seconds of a fit and of all that follows, as far as these are known."""
        inputs = candidate.predict_seconds(len(self.groups))
        return candidate.fit_seconds(self._samples()) + inputs + self.judging

    def _together(self, waiting: Sequence[Candidate]) -> list[int]:
        """The places of the candidates that share the next pass; none if there is no time for any of them.

        Within a limit it is one alone, the first for which there is time: what comes after a long fit may be quick.
        """
        left = self.left()
        if left < float("inf"):
            in_time = (place for place, candidate in enumerate(waiting) if self._expected(candidate) <= left)
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
            f"{candidate.name}: it would take about {self._expected(candidate):.0f} s, and {max(self.left(), 0):.0f} s "
            "were left."
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
            start = time.monotonic()
            try:
                self._judge(candidate, information, seconds)
            except (CovarianceError, torch.OutOfMemoryError) as error:
                self.not_tried.append(f"{candidate.name}: {_first_sentence(error)}")
            self.judging = max(self.judging, time.monotonic() - start)

    def _collected(self, candidates: Sequence[Candidate]) -> list[tuple[Information, float]]:
        """The information of each, and the seconds that it took."""
        missing = [candidate.request for candidate in candidates if candidate.request is not None]
        found = iter(self._collected_of(missing) if missing else [])
        return [next(found) if one.information is None else (one.information, 0.0) for one in candidates]

    def _collected_of(self, requests: Sequence[Request]) -> list[tuple[Information, float]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StructureNotice)
            if self.team.is_alone:
                return collect_several(
                    requests, self.train, progress=self.progress, tick=self.tick, at_once=self._at_once()
                )
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
        posteriors, variants, microseconds = self._variants([by_evidence, *others])
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

    def _judged(self, variants: Sequence[HeldOut]) -> list[Judged]:
        def run() -> list[Judged] | None:
            if not self.team.leads:
                return None
            with plain_execution(variants[0].mean.device), warnings.catch_warnings():
                warnings.simplefilter("ignore", CalibrationWarning)
                return judged(variants, self.folds, self.seed, self.tick)

        result: list[Judged] = self.team.broadcast(self.team.together(run))
        return result

    def _posteriors(self, information: Information) -> tuple[Posterior, list[Posterior]]:
        """With the prior by the evidence (1 without labels), and with those that held-out data may choose."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            first = condition(information, Prior(1.0))
            is_quick = self._is_quick(information)
            prior = Prior(1.0)
            if information.log_likelihood is not None:
                prior = prior_by_evidence(information, EVIDENCE_PRECISIONS if is_quick else _FEW_PRECISIONS, self.tick)
            by_evidence = condition(information, prior)
            others = []
            for precision in PRECISIONS if is_quick else _FEW_PRECISIONS:
                self.tick()
                try:
                    other = first if precision == 1 else condition(information, Prior(precision))
                except CovarianceError:
                    continue
                if other.jitter == 0:
                    others.append(other)
        return by_evidence, others

    def _is_quick(self, information: Information) -> bool:
        """Whether there is time for many priors. What came from a file has no plan, and counts as exact."""
        cost = cost_of(information.task)
        products = float(information.n_parameters) ** 3 if cost is None else cost.once_products - cost.first_products
        return information.n_classes <= _FEW_CLASSES and products <= by_device(_MOST_PRODUCTS, self.device.type)

    def _variants(self, posteriors: Sequence[Posterior]) -> tuple[list[Posterior], list[HeldOut], float]:
        """The held-out Gaussians of each posterior from one pass, and the microseconds for an input of one of them.

        A posterior whose covariance has no root left after rounding (a prior that is too weak) is dropped.
        """
        seconds, count = 0.0, 0

        def read() -> list[HeldOut | CovarianceError] | None:
            nonlocal seconds, count
            parts: list[list[LogitGaussian]] = [[] for _ in posteriors]
            labels: list[Tensor] = []
            for batch in (part for whole in stream for part in pieces(whole, self._at_once())):
                self.tick()
                begin = time.perf_counter()
                for part, gaussian in zip(parts, self._gaussians(posteriors, batch), strict=True):
                    part.append(gaussian)
                labels.append(labels_for(parts[0][-1], batch))
                seconds += time.perf_counter() - begin
                count += len(batch)
            return [_held_out_or_error(part, labels) for part in parts] if labels else None

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
        return kept, variants, 1e6 * seconds / max(count, 1) / len(posteriors)

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
            posterior, at = self.cheapest[0], self._final(self._largest_covariance)
            reason = reason_without(rows, at)
        else:
            tried = next(tried for tried in self.tried if tried.trial is best)
            row = best.row
            posterior, at = tried.posterior, self._final(partial(self._calibration_of, tried))
            reason = reason_for(row, rows)
        return Choice(
            posterior=posterior.with_calibration(**at.described()),
            rows=rows,
            baselines=self.baselines,
            chosen=None if best is None else best.row,
            reason=reason,
            not_tried=(*left_out, *self.not_tried),
            temperature_scaling=self.cheapest[0].with_calibration(**scaling_calibration.described()),
        )

    def _calibration_of(self, tried: _Tried) -> Calibration:
        """Fitted to all held-out data; T_c moves towards 1 as far as the rule allows for what was never out of fold."""
        row = tried.trial.row
        return calibration_near(
            tried.held_out,
            tried.names,
            Calibration(row.temperature, row.covariance_scale, row.softening),
            self._final_draws(),
            self.seed,
            is_as_good=partial(is_as_good, groups=self.groups),
        )

    def _largest_covariance(self) -> Calibration:
        rule = partial(is_as_good, groups=self.groups)
        return largest_covariance(self.cheapest_held_out, self._final_draws(), self.seed, rule)

    def _final_draws(self) -> int:
        """Those of `predict`, where they can be afforded: what is fitted to them is not worse with them."""
        assert self.cheapest is not None
        return affordable_draws(self.cheapest[0].information.n_classes, _FINAL_DRAWS)

    @property
    def cheapest_held_out(self) -> HeldOut:
        assert self.cheapest is not None
        return self.cheapest[1]

    def _final(self, fitted: Callable[[], Calibration]) -> Calibration:
        """A calibration that the first rank computes for all."""
        assert self.cheapest is not None

        def run() -> Calibration | None:
            if not self.team.leads:
                return None
            with plain_execution(self.cheapest_held_out.mean.device):
                return fitted()

        result: Calibration = self.team.broadcast(self.team.together(run))
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
