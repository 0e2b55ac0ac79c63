"""What `autofit` may try: which parameters, in which structure, with which Fisher information, at which cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from errbar._model.batch import Unpack
from errbar._model.network import Output
from errbar._planning.choice import cost_of
from errbar._planning.plan import Option, Subject, plan
from errbar._posterior.collect import Request
from errbar._posterior.information import Information
from errbar.errors import ArgumentError, ErrbarError, MismatchError

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
# Seconds that the exact information may take before labels are drawn instead; and the share of a limit.
_PATIENCE, _PATIENT_SHARE = 300.0, 0.35
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

    def fit_seconds(self, samples: float) -> float:
        if self.option is None:
            return 0.0
        return self.option.fit_seconds_per_sample * samples + self.option.seconds_once

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
        """As they are listed, but nothing before what takes less than half its time: the plan measures the speed, and
        what is nearly as quick should not change places from call to call."""
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
        patience = _PATIENCE if self.seconds is None else _PATIENT_SHARE * self.seconds
        if may_draw and option is not None and option.fit_seconds_per_sample * (self.samples or 0) > patience:
            drawn = replace(request, fisher="sampled")
            cheaper = self._option(drawn)
            if cheaper is not None and cheaper.fit_seconds_per_sample < option.fit_seconds_per_sample:
                request, option = drawn, cheaper
        if option is None:
            return None
        if option.exact:
            # Where nothing exact fits, `auto` may mix.
            request = replace(request, structure=option.structure)
        return Candidate.planned(label, request, option)

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
