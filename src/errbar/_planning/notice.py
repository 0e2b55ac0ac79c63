"""Notices before work that takes long: a fit, a factorisation, a prediction.

They are estimates, by the costs that `errbar.plan` shows, from what the first passes of a fit have shown anyway: the
layout of the network and the time of a pass. Nothing is run for them, unless the estimate is large even for a slow
machine; then the speed of matrix products is tried out, for milliseconds, once in a process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from errbar._base.memory import usable_bytes
from errbar._base.speed import MachineSpeed
from errbar._curvature.layout import Layout
from errbar._curvature.mixture import is_mixture
from errbar._curvature.registry import structure_called, structure_names
from errbar._curvature.structure import planned_cost
from errbar._curvature.task import Task
from errbar._curvature.workload import Cost, Workload
from errbar._model.selection import Selection
from errbar._planning.seconds import Seconds, duration
from errbar.errors import CostNotice

# Whatever takes longer is told beforehand.
NOTICED_SECONDS = 30.0
# No machine is slower: what is quick by these needs no trial.
_SLOW = MachineSpeed(product=1e-9, double=1e-9, draw=1e-7, launch=1e-4)
# An alternative is worth its mention if it takes less than this share of the time.
_WORTHWHILE = 0.5
_FEWER_SAMPLES = 100
# For each task, by the number of Monte Carlo samples and the limit: for how many inputs a prediction is known to be
# quick. The estimate would take a tenth of a prediction for one input.
_QUICK: WeakKeyDictionary[Task, dict[tuple[int, float], int]] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Work:
    """What is to be done: a fit to so many samples, a prediction for so many inputs, and what comes once."""

    samples: int = 0
    inputs: int = 0
    once: bool = False
    first: bool = False

    def stages(self, seconds: Seconds) -> dict[str, float]:
        """The seconds of each stage, by what it is called in a sentence."""
        return {
            f"fit to {self.samples:,} samples": self.samples * seconds.sample,
            "factorisation": seconds.factorise if self.once else 0.0,
            "first prediction": seconds.first + self.inputs * seconds.input if self.first else 0.0,
            f"prediction for {self.inputs:,} inputs": 0.0 if self.first else self.inputs * seconds.input,
        }


@dataclass(frozen=True)
class _Choice:
    """What was asked for, or could be asked for instead; `words` says how. No `draws` are those of the logits alone."""

    words: str
    selection: Selection
    structure: str
    scores: int
    draws: int


def tell_of_fit(task: Task, rank: int, samples: int | None) -> None:
    """Before a fit to so many samples, if that is known: of the fit, the factorisation and the first prediction."""
    told = _told(task, _Work(samples=samples or 0, once=True, first=True), rank)
    if told:
        task.network.told.update(("factorisation", "first prediction"))


def tell_of_factorisation(task: Task) -> None:
    """Before the information is factorised, unless the fit has told of it."""
    if "factorisation" not in task.network.told:
        _told(task, _Work(once=True), task.rank)
    task.network.told.add("factorisation")


def tell_of_prediction(task: Task, inputs: int, samples: int | None) -> None:
    """Before a prediction for some inputs, with so many Monte Carlo samples, or None for the logits alone."""
    told = task.network.told
    quick, asked = _QUICK.setdefault(task, {}), (samples or 0, NOTICED_SECONDS)
    if "prediction" not in told and inputs > quick.get(asked, -1):
        is_first = "first prediction" not in told
        if _told(task, _Work(inputs=inputs, first=is_first), task.rank, samples or 0):
            told.add("prediction")
        else:
            quick[asked] = inputs
    told.add("first prediction")


def _told(task: Task, work: _Work, rank: int, draws: int = 1000) -> bool:
    """Whether there was something to tell, which is then a warning."""
    layout = task.layout
    if layout is None:
        # A file has none; nothing is known of the network then.
        return False
    asked = _Choice("", task.selection, task.structure, 0 if task.scores is None else task.scores.draws, draws)

    def stages(choice: _Choice, speed: MachineSpeed) -> dict[str, float]:
        sizes = _workload(task, layout, choice, rank)
        # Where no pass was timed, only products are counted: too little rather than too much.
        forward = layout.sample_seconds if math.isfinite(layout.sample_seconds) else 0.0
        share = layout.tail_share(choice.selection)
        return work.stages(Seconds.of(_cost(choice, sizes), sizes, share, forward, speed))

    if max(stages(asked, _SLOW).values()) <= NOTICED_SECONDS:
        return False
    speed = MachineSpeed.of(task.network.device, task.dtype)
    long = {name: seconds for name, seconds in stages(asked, speed).items() if seconds > NOTICED_SECONDS}
    if not long:
        return False
    total = sum(stages(asked, speed).values())
    usable = usable_bytes(task.network.device)
    if work.samples and _cost(asked, _workload(task, layout, asked, rank)).peak_bytes > usable:
        # It will be refused.
        return False
    advice: dict[str, tuple[float, str]] = {}
    for kind, choice in _alternatives(task, layout, asked, work):
        seconds = sum(stages(choice, speed).values())
        fits = _cost(choice, _workload(task, layout, choice, rank)).peak_bytes <= usable
        if kind not in advice and fits and seconds < _WORTHWHILE * total:
            advice[kind] = seconds, choice.words
    warnings.warn(_sentence(long, list(advice.values())), CostNotice, stacklevel=5)
    return True


def _workload(task: Task, layout: Layout, choice: _Choice, rank: int) -> Workload:
    work = layout.workload(
        choice.selection,
        batch=task.batch_size,
        fisher=task.fisher_form,
        dtype=task.dtype,
        rank=rank,
        draws=choice.draws,
        scores=choice.scores,
    )
    return replace(work, fisher="sampled") if choice.scores else work


def _cost(choice: _Choice, work: Workload) -> Cost:
    structure = structure_called(choice.structure)
    return planned_cost(structure, work) if choice.draws else structure.cost(work)


def _alternatives(task: Task, layout: Layout, asked: _Choice, work: _Work) -> Iterator[tuple[str, _Choice]]:
    """What else could be asked for, and of which kind that is; of each kind the nearest first."""
    start = "a fit with " if work.inputs else ""
    if work.inputs and asked.draws > _FEWER_SAMPLES:
        yield "samples", replace(asked, words=f"samples={_FEWER_SAMPLES}", draws=_FEWER_SAMPLES)
    if work.samples and task.fisher_form == "ggn":
        yield "fisher", replace(asked, words="fisher='sampled'", scores=1)
    for name in structure_names():
        if name != task.structure:
            yield "structure", replace(asked, words=f"{start}structure='{name}'", structure=name)
    if is_mixture(task.structure):
        # It names layers that a smaller selection lacks.
        return
    for words, selection in (("parameters='vectors'", layout.vectors()), ("last_layers=1", layout.last(1))):
        if selection.n_parameters < task.selection.n_parameters:
            yield words, replace(asked, words=start + words, selection=selection)


def _sentence(long: dict[str, float], advice: list[tuple[float, str]]) -> str:
    stages = [f"the {name} about {duration(seconds)}" for name, seconds in long.items()]
    quicker = [f"{words} (about {duration(seconds)} in all)" for seconds, words in advice]
    instead = f" Quicker: {', '.join(quicker)}." if quicker else ""
    takes = " and ".join([", ".join(stages[:-1]), stages[-1]] if len(stages) > 1 else stages)
    return (
        f"{takes[0].upper()}{takes[1:].replace(' about ', ' will take about ', 1)}, by the costs of errbar.plan."
        f"{instead} warnings.simplefilter('ignore', errbar.CostNotice) silences this."
    )
