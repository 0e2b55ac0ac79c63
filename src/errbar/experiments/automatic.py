"""What `errbar.autofit` chooses for a trained network, beside temperature scaling, on data that chose nothing."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

import errbar
from errbar._choosing.candidates import Question
from errbar._posterior.collect import collect_several
from errbar.experiments.evaluation import evaluate, paired
from errbar.experiments.methods import batched, of_posterior, tempered
from errbar.experiments.problem import Problem

BASELINE, CHOSEN = "temperature_nll", "autofit"


def collected(network: nn.Module, problem: Problem, *, progress: bool = False) -> dict[str, errbar.Information]:
    """What `autofit` would collect from the training data, for several choices with other held-out data."""
    batches = batched(problem.train)
    question = Question(network, batches[0], len(problem.train.y), None, None, None, None)
    candidates, _ = question.candidates(None)
    requests = [candidate.request for candidate in candidates if candidate.request is not None]
    results = collect_several(requests, batches, progress=progress, tick=lambda _: None)
    return {candidate.name: found for candidate, (found, _) in zip(candidates, results, strict=True)}


def study(
    network: nn.Module,
    problem: Problem,
    *,
    candidates: Mapping[str, errbar.Information | Mapping[str, Any]] | None = None,
    groups: Sequence[int] | None = None,
    seconds: float | None = None,
    title: str = "autofit",
    progress: bool = False,
) -> dict[str, Any]:
    """The choice, and its scores on test data, outliers and shifted test data, with those of temperature scaling.

    T by NLL on the validation data, which are the held-out data of `autofit` too; `groups` say which of them belong
    together. `candidates` are those of `collected`, if that was called already, or as `errbar.autofit` takes them.
    """
    start = time.perf_counter()
    with warnings.catch_warnings():
        # T_c at its bound is not a warning here.
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        choice = errbar.autofit(
            network,
            batched(problem.train),
            batched(problem.validation),
            candidates=candidates,
            groups=groups,
            seconds=seconds,
            progress=progress,
        )
    duration = time.perf_counter() - start
    methods = {
        BASELINE: tempered("temp. scaling, T by NLL", network, problem, "nll", 0.0),
        CHOSEN: of_posterior("autofit", choice.posterior, duration),
    }
    results = evaluate(methods, problem, title=title, progress=progress)
    return {
        "seconds": duration,
        "reason": choice.reason,
        "chosen": None if choice.chosen is None else asdict(choice.chosen),
        "rows": [asdict(row) for row in (*choice.baselines, *choice.rows)],
        "not_tried": list(choice.not_tried),
        **{part: results[part] for part in ("scores", "outliers", "shift")},
    }


def differences(studies: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`autofit` minus temperature scaling, paired over the runs; for outliers 1 − AUROC of the entropy, in per cent."""

    def compared(values: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        return paired([value[CHOSEN] for value in values], [value[BASELINE] for value in values])

    found = {
        name: compared([{key: scores[name] for key, scores in one["scores"].items()} for one in studies])
        for name in ("nll", "ece", "brier")
    }
    for name in studies[0]["outliers"]:
        areas = [one["outliers"][name]["entropy"] for one in studies]
        found[f"1 − AUROC %, {name}"] = compared(
            [{key: 100 * (1 - area) for key, area in each.items()} for each in areas]
        )
    for kind, shift in studies[0]["shift"].items():
        mean = [
            {key: statistics.fmean(values[1:]) for key, values in one["shift"][kind]["nll"].items()} for one in studies
        ]
        found[f"mean {kind}"] = compared(mean)
        for index, severity in enumerate(shift["severity"]):
            at = [{key: values[index] for key, values in one["shift"][kind]["nll"].items()} for one in studies]
            found[f"{kind} {severity:g}"] = compared(at)
    return found
