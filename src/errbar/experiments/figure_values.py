"""What the figures of an experiment show: its result, put together over the seeds.

A result is a mapping as its JSON file holds it; numbers that cannot be drawn, null or infinite there, are NaN here.
An ECE is in per cent where `evaluation` and `reproduce` wrote it, and a fraction where `sequences` did (`fusion`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from errbar.errors import DataError
from errbar.metrics import Reliability
from errbar.plots import Style, styles

Result = Mapping[str, Any]

PAPER = ("standard", "temperature", "ensemble", "dropout", "proposed", "proposed_tc")
# Their order gives them their style, the same in the figures of every experiment; the first nine differ in colour.
KNOWN = (
    *(*PAPER, "laplace_tuned", "both", "laplace_default", "ggn", "temperature_nll", "proposed_tc_nll"),
    *("evidence", "evidence_both", "validation", "validation_both", "softened"),
)
# What is drawn where the lines of all methods would be too many to follow: the paper's, ours, the peer's.
MAIN = KNOWN[:9]
_SOUGHT = ("standard", "ensemble", "dropout", "proposed_tc", "both", "norms_ggn_both")
_SCORES = ("entropy", "mutual information", "contrast variance")
_MOST_CURVES, _FEW = 12, 5
MEASURES = ("nll", "ece", "accuracy")
_SCORE = " · "


def checked(result: Any) -> Result:
    """The result, if it has what every figure needs."""
    required_types = {"experiment": str, "methods": Mapping, "runs": Sequence}
    for part, kind in required_types.items():
        value = result.get(part) if isinstance(result, Mapping) else None
        if not isinstance(value, kind):
            raise DataError(
                f"The result has {type(value).__name__} as {part!r}; expected a {kind.__name__.lower()}. Pass the "
                "content of a result file: json.loads(path.read_text())."
            )
    return result  # type: ignore[no-any-return]


def numbers(values: Any) -> Float[Tensor, "..."]:
    """A tensor of a list of numbers and nulls, or of lists of such."""
    array = np.array(values, dtype=np.float64)  # None becomes NaN
    return torch.from_numpy(np.where(np.isfinite(array), array, np.nan))


def readable(text: str) -> str:
    """A name with T and T_c as the symbols that they are."""
    return text if "$" in text else re.sub(r"\bT(_c)?\b", lambda symbol: f"${symbol[0]}$", text)


def name_of(result: Result, method: str) -> str:
    """The name of a method, or the key itself where it has none."""
    return readable(str(result["methods"].get(method, method)))


def looks(result: Result) -> dict[str, Style]:
    """The style of everything that figures compare, by key and by readable name."""
    methods = [*KNOWN, *result["methods"], *(key for run in result["runs"] for key in run.get("reliability", {}))]
    names = {name_of(result, key) for key in methods}
    fusion = [name for name in map(readable, fusion_names(result)) if name not in {*methods, *names}]
    by_key = styles([*methods, *fusion])
    return {**by_key, **{name_of(result, key): by_key[key] for key in reversed(methods)}}


def fusion_names(result: Result) -> list[str]:
    """Ways of fusing frames, those with curves first."""
    fusion = result.get("fusion", {})
    places = fusion.get("sequences", {}).get("methods", {}), fusion.get("strip", {}).get("pmf", {})
    return list(dict.fromkeys(name for place in places for name in place))


@dataclass(frozen=True, eq=False)
class PooledReliability:
    """The predictions of all seeds in one diagram, and the ECE of each seed by itself."""

    diagram: Reliability
    ece: Float[Tensor, "R"]

    @property
    def note(self) -> str:
        """The mean ECE of the seeds: that of the pooled diagram is smaller, where the seeds err to different sides."""
        return f"ECE {plus_minus(100 * self.ece, 1)} %"


def reliability(result: Result) -> dict[str, PooledReliability]:
    """Method → diagram, in the order of the methods."""
    seeds: dict[str, list[Reliability]] = {}
    for run in result["runs"]:
        for method, values in run.get("reliability", {}).items():
            count, accuracy, confidence = (numbers(values[part]) for part in ("count", "accuracy", "confidence"))
            if count.sum() > 0:
                edges = torch.linspace(0, 1, len(count) + 1, dtype=torch.float64)
                seeds.setdefault(method, []).append(Reliability(edges, count.long(), accuracy, confidence))
    return {method: _pooled(seeds[method]) for method in _ordered(result, seeds)}


def _pooled(seeds: Sequence[Reliability]) -> PooledReliability:
    count = torch.stack([seed.count for seed in seeds])

    def mean(values: Float[Tensor, "R J"]) -> Float[Tensor, "J"]:
        return torch.where(count > 0, count * values, 0.0).sum(0) / count.sum(0)

    gap = torch.stack([seed.gap for seed in seeds])
    accuracy = mean(torch.stack([seed.accuracy for seed in seeds]))
    confidence = mean(torch.stack([seed.confidence for seed in seeds]))
    diagram = Reliability(seeds[0].edges, count.sum(0), accuracy, confidence)
    return PooledReliability(diagram, (count * gap).sum(1) / count.sum(1))


@dataclass(frozen=True, eq=False)
class Shift:
    """Measures under one kind of shift: measure → method → (seeds, severities)."""

    severity: list[float]
    measures: dict[str, dict[str, Float[Tensor, "R S"]]]


def shifts(result: Result) -> dict[str, Shift]:
    """Kind of shift → measures."""
    by_kind: dict[str, Shift] = {}
    for kind in _keys(run.get("shift", {}) for run in result["runs"]):
        runs = [run["shift"][kind] for run in result["runs"] if kind in run.get("shift", {})]
        severity = runs[0]["severity"]
        if any(run["severity"] != severity for run in runs):
            raise DataError(f"The seeds have different severities of {kind!r}; expected the same, to average over.")
        measures = {}
        for measure in MEASURES:
            methods = _ordered(result, _keys(run.get(measure, {}) for run in runs))
            of_seeds = {m: [run[measure][m] for run in runs if m in run.get(measure, {})] for m in methods}
            if of_seeds:
                measures[measure] = {m: numbers(values) for m, values in of_seeds.items()}
        by_kind[kind] = Shift(severity, measures)
    return by_kind


@dataclass(frozen=True, eq=False)
class MeanCurve:
    """The mean over the seeds of y at each x, and the area under the curve of each seed."""

    x: list[float]
    y: list[float]
    areas: Float[Tensor, "R"]


def roc_curves(result: Result) -> dict[str, dict[str, MeanCurve]]:
    """Dataset → label → mean ROC curve: the true-positive rate is averaged at each false-positive rate.

    The areas are those of all seeds, also where only the first has kept its curve. Of very many curves a selection.
    """
    by_dataset: dict[str, dict[str, MeanCurve]] = {}
    for dataset in _keys(run.get("roc", {}) for run in result["runs"]):
        runs = [run["roc"][dataset] for run in result["runs"] if dataset in run.get("roc", {})]
        for label in _selected(_keys(runs)):
            seeds = [run[label] for run in runs if label in run]
            areas = numbers(_areas(result, dataset, label) or [seed["auroc"] for seed in seeds])
            x, y = _mean_curve([(seed["fpr"], seed["tpr"]) for seed in seeds])
            by_dataset.setdefault(dataset, {})[label] = MeanCurve([0.0, *x], [0.0, *y], areas)
    return by_dataset


def _selected(labels: Sequence[str]) -> Sequence[str]:
    """All; of very many those of methods that stand for a kind, by scores that are not much the same, or the first."""
    parts = [label.partition(_SCORE) for label in labels]
    telling = [
        label for label, (method, _, score) in zip(labels, parts, strict=True) if method in _SOUGHT and score in _SCORES
    ]
    return telling if len(labels) > _MOST_CURVES and len(telling) >= _FEW else labels[:_MOST_CURVES]


def _areas(result: Result, dataset: str, label: str) -> list[float]:
    """AUROCs of all seeds, from where the tables have them: dataset → score → method."""
    method, _, score = label.partition(_SCORE)
    areas = [run.get("outliers", {}).get(dataset, {}).get(score, {}).get(method) for run in result["runs"]]
    return [area for area in areas if area is not None]


def method_and_score(result: Result, label: str) -> tuple[str, str]:
    """The two parts of a label "method · score"; the method by its name. Without a score it is empty."""
    method, _, score = label.partition(_SCORE)
    return name_of(result, method), readable(score)


def risk_coverage(result: Result) -> dict[str, tuple[list[float], list[float]]]:
    """Method → mean risk–coverage curve."""
    methods = _ordered(result, _keys(run.get("risk_coverage", {}) for run in result["runs"]))
    curves = {}
    for method in methods:
        runs = [run["risk_coverage"] for run in result["runs"] if method in run.get("risk_coverage", {})]
        curves[method] = _mean_curve([(run[method]["coverage"], run[method]["risk"]) for run in runs])
    return curves


@dataclass(frozen=True, eq=False)
class ScaleCurves:
    """NLL and ECE against T_c: measure → (seeds, scales); and the T_c that each seed chose by either measure."""

    scale: Float[Tensor, "S"]
    measures: dict[str, Float[Tensor, "R S"]]
    chosen: dict[str, Float[Tensor, "R"]]

    def at_chosen(self, measure: str, by: str) -> Float[Tensor, "R"]:
        """A measure of each seed at the T_c that it chose by another."""
        chosen, curves = self.chosen[by].log(), self.measures[measure]
        values = [np.interp(float(at), self.scale.log(), curve) for at, curve in zip(chosen, curves, strict=True)]
        return numbers(values)


def scale_curves(result: Result) -> ScaleCurves | None:
    """On the scales of the first seed, the others interpolated in ln T_c; T_c = 0 has no place on that axis."""
    runs = [run["scale_curve"] for run in result["runs"] if "scale_curve" in run]
    if not runs:
        return None
    scale = numbers(runs[0]["covariance_scale"])
    scale = scale[scale > 0]
    measures = {}
    for measure in ("nll", "ece"):
        curves = []
        for run in runs:
            own, values = numbers(run["covariance_scale"]), numbers(run[measure])
            curves.append(np.interp(scale.log(), own[own > 0].log(), values[own > 0]))
        measures[measure] = numbers(curves)
    chosen = {by: numbers([run.get("chosen", {}).get(by) for run in runs]) for by in ("nll", "ece")}
    return ScaleCurves(scale, measures, chosen)


def plus_minus(values: Float[Tensor, "R"], digits: int) -> str:
    """mean ± standard deviation over the seeds; of one seed its value."""
    mean = f"{float(values.mean()):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {float(values.std()):.{digits}f}"


def _mean_curve(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """The mean of y over the curves at every x that one of them has; of one curve its own points."""
    if len(curves) == 1:
        x, y = curves[0]
        return list(x), list(y)
    grid = np.unique(np.concatenate([np.asarray(x, dtype=np.float64) for x, _ in curves]))
    mean = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)
    return grid.tolist(), mean.tolist()


def _keys(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _ordered(result: Result, methods: Iterable[str]) -> list[str]:
    """In the order of the result's methods; what is not among them comes last."""
    order = list(methods)
    return [m for m in result["methods"] if m in order] + [m for m in order if m not in result["methods"]]


def shown(methods: Sequence[str], *, everything: bool) -> list[str]:
    """The methods of a figure: all, or where all are too many the main ones, and then `everything` in a second figure.

    An experiment with other methods than these has its first ones instead.
    """
    if len(methods) <= len(MAIN):
        return [] if everything else list(methods)
    main = [method for method in methods if method in MAIN]
    return list(methods) if everything else main if len(main) >= _FEW else list(methods[: len(MAIN)])
