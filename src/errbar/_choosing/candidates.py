"""What `autofit` may try: which parameters, in which structure, with which Fisher information, at which cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch import nn

from errbar._choosing.deadline import PLAN_ERROR, Deadline
from errbar._curvature.fisher import fisher_form, require_fisher
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import planned_cost
from errbar._curvature.task import product_dtype
from errbar._curvature.workload import BACKWARD_PASSES, by_device
from errbar._distributed.team import Team
from errbar._model.batch import Batch, Unpack, batches, count_batches, pieces
from errbar._model.network import Output
from errbar._planning.choice import cost_of
from errbar._planning.plan import Option, Subject, plan
from errbar._posterior.collect import Request
from errbar._posterior.information import Information
from errbar.errors import ArgumentError, DataError, ErrbarError, MismatchError

# The whole network by what fits any memory; the others exactly where that fits, or as `auto` mixes.
_DEFAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("last layer", {"last_layers": 1, "structure": "auto"}),
    ("last two layers", {"last_layers": 2, "structure": "auto"}),
    ("last layer and vectors", {"parameters": "vectors", "structure": "auto"}),
    ("all", {"parameters": "all", "structure": "kron"}),
    ("all", {"parameters": "all", "structure": "lowrank"}),
)
# What a user may name of a candidate: the keywords of `collect` that say what to collect.
_KEYWORDS = ("last_layers", "parameters", "structure", "fisher", "draws", "rank", "precision")
# What the exact information may take before labels are drawn instead: a share of the limit; or, without one,
# multiplications by the device, five minutes or so, because a clock would not choose the same on a busy machine.
_PATIENT_SHARE, _PATIENT_PRODUCTS = 0.35, {"cpu": 1.5e13, "cuda": 1.5e15}
_NEARLY_AS_QUICK = 2.0


@dataclass(frozen=True, eq=False)
class Candidate:
    """What to collect and what that costs by the plan; or information that was collected already."""

    label: str
    structure: str
    fisher: str
    exact: bool
    posterior_bytes: int
    request: Request | None = None
    option: Option | None = None
    information: Information | None = None

    @classmethod
    def planned(cls, label: str, request: Request, option: Option) -> Candidate:
        structure = option.structure if request.structure == "auto" else str(request.structure)
        return cls(label, structure, request.fisher, option.exact, option.posterior_bytes, request, option)

    @classmethod
    def collected(cls, label: str, information: Information) -> Candidate:
        cost = cost_of(information.task)
        exact, size = (information.structure == "dense", 0) if cost is None else (cost.exact, cost.posterior_bytes)
        return cls(label, information.structure, information.fisher, exact, size, information=information)

    @property
    def name(self) -> str:
        return f"{self.label}, {self.structure}"

    @property
    def fit_bytes(self) -> int:
        return 0 if self.option is None else self.option.fit_bytes

    @property
    def sample_seconds(self) -> float:
        return 0.0 if self.option is None else self.option.fit_seconds_per_sample

    @property
    def once_seconds(self) -> float:
        """Of a factorisation and of what the first prediction makes of it: for each prior."""
        return 0.0 if self.option is None else self.option.seconds_once

    def fit_seconds(self, samples: float) -> float:
        return self.sample_seconds * samples + self.once_seconds

    def predict_seconds(self, inputs: int) -> float:
        return 0.0 if self.option is None else self.option.predict_seconds_per_input * inputs


Listed = tuple[str, dict[str, Any] | Information]


def listed_candidates(candidates: object) -> tuple[Listed, ...] | None:
    """The candidates of a user, with a label each; None for the usual ones."""
    if candidates is None:
        return None
    if isinstance(candidates, Mapping):
        named = [(str(label), candidate) for label, candidate in candidates.items()]
    elif isinstance(candidates, Sequence) and not isinstance(candidates, str):
        named = [("", candidate) for candidate in candidates]
    else:
        named = []
    if not named:
        raise ArgumentError(
            f"candidates is {candidates!r}; expected a list of mappings of keywords of errbar.collect, for example "
            "[{'last_layers': 1}, {'parameters': 'vectors', 'structure': 'block'}], or of Information; or a mapping of "
            "labels to these."
        )
    listed: list[Listed] = []
    for number, (label, candidate) in enumerate(named, 1):
        if isinstance(candidate, Information):
            listed.append((label or f"information {number}", candidate))
            continue
        if not isinstance(candidate, Mapping) or not set(candidate) <= set(_KEYWORDS):
            raise ArgumentError(
                f"A candidate is {candidate!r}; expected a mapping of some of {', '.join(_KEYWORDS)} to values, as "
                "errbar.collect takes them, or the Information that it returned."
            )
        listed.append((label or _label(candidate), dict(candidate)))
    return tuple(listed)


def _label(candidate: Mapping[str, Any]) -> str:
    layers, parameters = candidate.get("last_layers"), candidate.get("parameters")
    if layers is not None:
        return "last layer" if layers == 1 else f"last {layers} layers"
    if parameters == "vectors":
        return "last layer and vectors"
    return parameters if isinstance(parameters, str) else ", ".join(parameters or ())


@dataclass(frozen=True, eq=False)
class Question:
    """A network, a batch of its training data, the limits of memory and time, and how many inputs are held out."""

    model: nn.Module
    example: Any
    samples: int | None
    memory: int | None
    seconds: float | None
    unpack: Unpack | None
    output: Output
    held_out: int = 0

    def candidates(self, listed: tuple[Listed, ...] | None) -> tuple[list[Candidate], list[str]]:
        """Those that fit into memory, the cheapest first; and why others are left out."""
        found: list[Candidate] = []
        left_out: list[str] = []
        for label, keywords in listed or _DEFAULTS:
            if isinstance(keywords, Information):
                found.append(Candidate.collected(label, self._own(keywords)))
                continue
            try:
                candidate = self._candidate(label, keywords, may_draw=listed is None)
            except ErrbarError as error:
                if listed is not None:
                    raise
                # Fewer layers than asked for: an earlier candidate has all of them.
                if "last_layers" not in keywords:
                    left_out.append(f"{label}, {keywords['structure']}: {error}")
                continue
            if candidate is None:
                left_out.append(f"{label}, {keywords.get('structure', 'dense')}: it does not fit into the memory.")
            elif not any(_is_same(candidate, other) for other in found):
                found.append(candidate)
        return self._cheapest_first(found), left_out

    def _cheapest_first(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Within a limit as they are listed, but nothing before what takes less than half its time: the plan measures
        the speed, and what is nearly as quick should not change places from call to call."""
        if self.seconds is None:
            # All are tried, so the order does not matter.
            return list(candidates)
        waiting, ordered = list(candidates), []
        while waiting:
            least = min(map(self._seconds, waiting))
            ordered.append(next(one for one in waiting if self._seconds(one) <= _NEARLY_AS_QUICK * least))
            waiting.remove(ordered[-1])
        return ordered

    def _seconds(self, candidate: Candidate) -> float:
        """Of the fit, and of the held-out inputs for one prior: with a covariance of thousands of parameters and many
        classes these take longer than the fit."""
        return candidate.fit_seconds(self.samples or 1) + candidate.predict_seconds(self.held_out)

    def _own(self, information: Information) -> Information:
        """Of this network; what came from a file has none."""
        information.task.require_classes("autofit")
        if not information.network.has_model:
            return information.with_model(self.model)
        if information.model is not self.model:
            raise MismatchError(
                "A candidate is Information about another model; expected Information that errbar.collect made with "
                "this one."
            )
        return information

    def _candidate(self, label: str, keywords: dict[str, Any], *, may_draw: bool) -> Candidate | None:
        request = Request(self.model, **keywords, unpack=self.unpack, output=self.output)
        option = self._option(request)
        if may_draw and option is not None and self._fit_work(request, option) > self._patience:
            drawn = replace(request, fisher="sampled")
            cheaper = self._option(drawn)
            if cheaper is not None and self._fit_work(drawn, cheaper) < self._fit_work(request, option):
                request, option = drawn, cheaper
        if option is None:
            return None
        if option.exact:
            # Where nothing exact fits, `auto` may mix.
            request = replace(request, structure=option.structure)
        return Candidate.planned(label, request, option)

    @property
    def _patience(self) -> float:
        """How much the exact information may take, in what `_fit_work` counts."""
        if self.seconds is not None:
            return _PATIENT_SHARE * self.seconds
        _, layout, _ = self._subject.looked
        return by_device(_PATIENT_PRODUCTS, layout.network.device.type)

    def _fit_work(self, request: Request, option: Option) -> float:
        """Of all samples: seconds by the plan within a limit, else multiplications, by sizes."""
        samples = self.samples or 0
        if self.seconds is not None:
            return option.fit_seconds_per_sample * samples
        kind = require_fisher(request.fisher)
        inspection, layout, size = self._subject.looked
        sizes: dict[str, Any] = {
            "batch": size,
            "fisher": fisher_form(layout.network.kind, kind),
            "dtype": product_dtype(layout.network, request.precision),  # type: ignore[arg-type]
            "rank": request.rank,
            "scores": request.draws if kind == "sampled" else 0,
        }
        selection = inspection.selected(last_layers=request.last_layers, parameters=request.parameters)
        cost = planned_cost(structure_called(option.structure), layout.workload(selection, **sizes))
        terms = layout.workload(layout.everything(), **sizes).terms
        # The derivative by the outputs of the first layer does not lead through it.
        behind = {event.module for event in islice(layout.tail(selection), 1, None)}
        forward = sum(term.uses * term.size for term in terms)
        backward = BACKWARD_PASSES * sum(term.uses * term.size for term in terms if term.module in behind)
        return samples * (forward + cost.seeds[0] * backward + cost.sample_products)

    @cached_property
    def _subject(self) -> Subject:
        """Looked at once: each look takes several passes of a batch, which may be a large part of the data."""
        return Subject(self.model, self.example, self.unpack, self.output)

    def _option(self, request: Request) -> Option | None:
        """The first structure of the plan that fits; the structure that was asked for unless that is "auto"."""
        planned = plan(
            self.model,
            self._subject,
            self.memory,
            fisher=request.fisher,
            rank=request.rank,
            precision=request.precision,
            draws=request.draws,
            last_layers=request.last_layers,
            parameters=request.parameters,
            structure=None if request.structure == "auto" else request.structure,
        )
        return next((option for option in planned.options if option.fits), None)


def _is_same(candidate: Candidate, other: Candidate) -> bool:
    """Whether the same parameters take part in the same way: selections of the usual candidates contain each other."""
    own, others = candidate.option, other.option
    if own is None or others is None:
        return False
    return (own.n_parameters, own.structure) == (others.n_parameters, others.structure)


def question_of(
    model: nn.Module,
    train: Any,
    listed: tuple[Listed, ...] | None,
    memory: int | None,
    deadline: Deadline,
    unpack: Unpack | None,
    output: Output,
) -> Question:
    if listed is not None and all(isinstance(candidate, Information) for _, candidate in listed):
        return Question(model, None, None, memory, deadline.seconds, unpack, output)
    if train is None:
        raise DataError("The training data are None; expected batches, because a candidate is yet to be collected.")
    first = next(batches(train, unpack), None)
    if first is None:
        raise DataError("The training data are empty: expected at least one batch.")
    # As many samples as there are in a part of a pass: with thousands at once a network is several times slower.
    example = next(pieces(first, deadline.at_once()))
    return Question(model, example, _count(train, first), memory, deadline.seconds, unpack, output)


def require_time_for_one(candidates: Sequence[Candidate], samples: float, limit: float) -> None:
    cheapest = min(candidates, key=lambda candidate: candidate.fit_seconds(samples))
    if cheapest.fit_seconds(samples) > PLAN_ERROR * limit:
        raise ArgumentError(
            f"seconds is {limit:g}, and the cheapest candidate alone ({cheapest.label}) takes about "
            f"{cheapest.fit_seconds(samples):.2g} s to fit; expected more time, or fewer training data."
        )


def _count(data: Any, first: Batch) -> int | None:
    number = count_batches(data)
    return None if number is None else number * len(first)


def same_everywhere(team: Team, candidates: list[Candidate], left_out: list[str]) -> tuple[list[Candidate], list[str]]:
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
