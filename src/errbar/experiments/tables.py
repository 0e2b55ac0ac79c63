"""Tables from result files, for the terminal and for the pages in `docs/results`.

In the document a table stands between `<!-- table: EXPERIMENT NAME -->` and `<!-- end -->`; `fill` rewrites it.
"""

from __future__ import annotations

import collections
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from errbar._base.atomic import write_file
from errbar.errors import ArgumentError
from errbar.experiments import acquiring
from errbar.experiments.automatic import differences
from errbar.experiments.evaluation import paired
from errbar.experiments.fusing import FUSED
from errbar.experiments.tracking import TRACK

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; the first column is left-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rule = ["---", *("---:" for _ in self.headings[1:])]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.headings, rule, *self.rows))


@dataclass(frozen=True)
class Measure:
    heading: str
    of: Callable[[Mapping[str, Any]], float]
    form: str
    higher_is_better: bool


MEASURES = (
    Measure("accuracy % ↑", lambda s: 100 * s["accuracy"], ".2f", True),
    Measure("Σ ln f ↑", lambda s: s["log_likelihood"], ".0f", True),
    Measure("NLL ↓", lambda s: s["nll"], ".4f", False),
    Measure("Brier ↓", lambda s: s["brier"], ".4f", False),
    Measure("ECE % ↓", lambda s: s["ece"], ".2f", False),
    Measure("literal ECE ↓", lambda s: s["ece_literal"], ".3f", False),
    Measure("AURC % ↓", lambda s: 100 * s["aurc"], ".3f", False),
    Measure("accuracy at 90 % ↑", lambda s: 100 * s["accuracy_at_90"], ".2f", True),
)


def score_table(result: Result) -> Table:
    """Mean ± standard deviation over the runs of each method; under ECE the mean interval of the runs."""
    rows = []
    for key, name in result["methods"].items():
        each = [run["scores"][key] for run in result["runs"]]
        cells = [mean_and_deviation([measure.of(one) for one in each], measure.form) for measure in MEASURES]
        bounds = [statistics.fmean(one["ece_interval"][side] for one in each) for side in (0, 1)]
        cells[4] += f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
        rows.append((name, *cells))
    return Table("On the test data", ("method", *(measure.heading for measure in MEASURES)), tuple(rows))


def fitted_table(result: Result) -> Table:
    """What was chosen on the validation data."""
    columns = {"temperature": "T", "covariance_scale": "T_c", "softening": "c", "prior_precision": "prior precision"}
    fitted = [run["scores"][key]["fitted"] for run in result["runs"] for key in result["methods"]]
    if not any(one.get("softening") for one in fitted):
        del columns["softening"]
    rows = []
    for key, name in result["methods"].items():
        each = [run["scores"][key]["fitted"] for run in result["runs"]]
        if each[0]:
            cells = [mean_and_deviation([one[n] for one in each], ".3g") if n in each[0] else "" for n in columns]
            rows.append((name, *cells))
    return Table("Chosen on the validation data", ("method", *columns.values()), tuple(rows))


def outlier_table(result: Result) -> Table:
    """AUROC in per cent of each method and score, one column per score and foreign data set."""
    columns = [(name, score) for name, scores in result["runs"][0]["outliers"].items() for score in scores]
    rows = []
    for key, name in result["methods"].items():
        cells = []
        for foreign, score in columns:
            each = [run["outliers"][foreign][score].get(key) for run in result["runs"]]
            cells.append("" if each[0] is None else mean_and_deviation([100 * area for area in each], ".1f"))
        rows.append((name, *cells))
    return Table("AUROC of outlier detection, %", ("method", *(f"{f}: {score}" for f, score in columns)), tuple(rows))


def shift_table(result: Result) -> Table:
    """NLL and ECE, averaged over the severities above none."""
    kinds = list(result["runs"][0]["shift"])
    rows = []
    for key, name in result["methods"].items():
        cells = []
        for kind in kinds:
            for measure, form in (("nll", ".3f"), ("ece", ".2f")):
                each = [statistics.fmean(run["shift"][kind][measure][key][1:]) for run in result["runs"]]
                cells.append(mean_and_deviation(each, form))
        rows.append((name, *cells))
    headings = tuple(f"{kind}: {measure}" for kind in kinds for measure in ("NLL ↓", "ECE % ↓"))
    return Table("Under shift, mean over the severities", ("method", *headings), tuple(rows))


def cost_table(result: Result) -> Table:
    """Seconds to prepare (training included) and to predict, and both relative to the standard network.

    A network that was trained elsewhere took no time here, so it has no relative cost.
    """
    runs = result["runs"]

    def seconds(key: str, quantity: str) -> float:
        return float(statistics.median(run["cost"][key][quantity] for run in runs))

    def relative(key: str, quantity: str, form: str) -> str:
        base = seconds("standard", quantity)
        return f"{seconds(key, quantity) / base:{form}}×" if base else "–"

    rows = tuple(
        (
            name,
            f"{seconds(key, 'prepare_seconds'):.1f}",
            relative(key, "prepare_seconds", ".2f"),
            f"{1e6 * seconds(key, 'predict_seconds'):.1f}",
            relative(key, "predict_seconds", ".1f"),
        )
        for key, name in result["methods"].items()
    )
    headings = ("method", "train and fit, s", "relative", "predict, µs per input", "relative")
    return Table(f"Cost on {result['device']}", headings, rows)


def paired_table(result: Result, first: str = "both") -> Table:
    """`first` minus each other method, paired by seed, with 95 % intervals; negative is better for `first`."""
    runs, rows = result["runs"], []

    def difference(of: Callable[[Mapping[str, Any], str], float], key: str, form: str) -> str:
        return _interval([of(run, first) for run in runs], [of(run, key) for run in runs], form)

    columns: dict[str, tuple[Callable[[Mapping[str, Any], str], float], str]] = {
        "NLL": (lambda run, key: run["scores"][key]["nll"], "+.4f"),
        "ECE %": (lambda run, key: run["scores"][key]["ece"], "+.2f"),
    }
    for foreign in runs[0]["outliers"]:
        columns[f"1 − AUROC %, {foreign}"] = (partial(_missed_area, foreign), "+.2f")
    for kind in runs[0]["shift"]:
        columns[f"NLL under {kind}"] = (partial(_shifted, kind), "+.3f")
    for key in ("temperature_nll", "standard", "ensemble", "laplace_default", "laplace_tuned", "proposed_tc"):
        if key in result["methods"]:
            cells = (difference(of, key, form) for of, form in columns.values())
            rows.append((result["methods"][key], *cells))
    return Table(f"{result['methods'][first]}, minus another", ("minus", *columns), tuple(rows))


def _missed_area(foreign: str, run: Mapping[str, Any], key: str) -> float:
    """1 − AUROC in per cent by the entropy of the PMF, which every method has."""
    return 100 * (1 - float(run["outliers"][foreign]["entropy"][key]))


def _shifted(kind: str, run: Mapping[str, Any], key: str) -> float:
    """NLL, averaged over the severities above none."""
    return statistics.fmean(run["shift"][kind]["nll"][key][1:])


def fusion_table(result: Result) -> Table:
    """Sequences: accuracy, NLL and ECE after 1, 3 and all frames."""
    runs = [run["fusion"]["sequences"] for run in result["runs"]]
    frames = runs[0]["frames"]
    counts = sorted({count for count in (1, 3, frames) if count <= frames})
    rows = tuple(
        (
            name,
            *(
                mean_and_deviation([factor * run["methods"][name][measure][count - 1] for run in runs], form)
                for measure, factor, form in (("accuracy", 100, ".1f"), ("nll", 1, ".3f"), ("ece", 100, ".1f"))
                for count in counts
            ),
        )
        for name in runs[0]["methods"]
    )
    headings = tuple(f"{m}, {c}" for m in ("accuracy %", "NLL", "ECE %") for c in counts)
    return Table("Frames of one object, after 1, 3 and all", ("method", *headings), rows)


def decision_table(result: Result, threshold: float = 0.95) -> Table:
    """Deciding when the maximal probability first exceeds a threshold."""
    runs = [run["fusion"]["sequences"]["decisions"] for run in result["runs"]]
    rows = []
    for name in runs[0]:
        each = [next(d for d in run[name] if d["threshold"] == threshold) for run in runs]
        cells = []
        for key in ("frames", "decided", "error", "error_of_all"):
            values = [decision[key] for decision in each if key in decision]
            cells.append(mean_and_deviation(values, ".3f") if values else "")
        rows.append((name, *cells))
    headings = ("method", "frames until decided", "share decided", "error of those", "error of all")
    return Table(f"Deciding at a probability of {threshold:g}", headings, tuple(rows))


def classifier_table(result: Result) -> Table:
    """Two classifiers trained on different halves."""
    runs = [run["fusion"]["classifiers"] for run in result["runs"]]
    rows = tuple(
        (
            name,
            *(
                mean_and_deviation([factor * run[name][measure] for run in runs], form)
                for measure, factor, form in (
                    ("accuracy", 100, ".2f"),
                    ("nll", 1, ".4f"),
                    ("brier", 1, ".4f"),
                    ("ece", 100, ".2f"),
                )
            ),
        )
        for name in runs[0]
    )
    return Table("Two classifiers", ("method", "accuracy % ↑", "NLL ↓", "Brier ↓", "ECE % ↓"), rows)


def cleaning_table(result: Result) -> Table:
    """Average precision of each ranking for each kind of mistake, and precision among as many as there are."""
    runs = [run["cleaning"]["ranking"] for run in result["runs"]]
    kinds = list(runs[0])
    rows = tuple(
        (
            score,
            *(
                mean_and_deviation([100 * run[kind][score][measure] for run in runs], ".1f")
                for kind in kinds
                for measure in ("average_precision", "precision_at_positives")
            ),
        )
        for score in runs[0][kinds[0]]
    )
    headings = tuple(f"{kind}: {m}" for kind in kinds for m in ("average precision %", "precision %"))
    return Table("Finding what is wrong in the training data", ("ranked by", *headings), rows)


def retraining_table(result: Result) -> Table:
    runs = [run["cleaning"]["retrained"] for run in result["runs"]]
    measures = (MEASURES[0], MEASURES[2], MEASURES[4])
    rows = tuple(
        (name, *(mean_and_deviation([m.of(run[name]) for run in runs], m.form) for m in measures)) for name in runs[0]
    )
    return Table("Trained again without", ("without", *(measure.heading for measure in measures)), rows)


def structure_table(result: Result) -> Table:
    """Structures of the posterior, each calibrated in the same way."""
    runs = [run["structures"] for run in result["runs"]]
    foreign = list(runs[0][0]["auroc"])
    rows = []
    for first in runs[0]:
        each = [one for run in runs for one in run if one["name"] == first["name"]]
        cells = [f"{first['parameters']:,}"]
        cells += [mean_and_deviation([100 * one["accuracy"] for one in each], ".2f")]
        cells += [
            mean_and_deviation([one[key] for one in each], form) for key, form in (("nll", ".4f"), ("ece", ".2f"))
        ]
        for name in foreign:
            for score in ("entropy", "mutual information"):
                cells.append(mean_and_deviation([100 * one["auroc"][name][score] for one in each], ".1f"))
        for key, factor, form in (("fit_seconds", 1, ".1f"), ("predict_seconds", 1e6, ".0f")):
            cells.append(format(statistics.median(factor * one[key] for one in each), form))
        rows.append((first["name"], *cells))
    areas = tuple(f"AUROC %, {name}: {score}" for name in foreign for score in ("entropy", "mutual information"))
    headings = ("parameters, structure", "n", "accuracy % ↑", "NLL ↓", "ECE % ↓", *areas, "fit, s", "predict, µs")
    return Table("Structures: prior by evidence, T and T_c by NLL", headings, tuple(rows))


def autofit_table(result: Result) -> Table:
    """What `autofit` chose for each network, minus temperature scaling on the test data, outliers and shifted data."""
    rows = []
    for name, by_seed in result.items():
        studies = list(by_seed.values())
        found = differences(studies)
        areas = [text for text in found if text.startswith("1 − AUROC")]
        shifts = [f"{kind} {_paired_difference(found[f'mean {kind}'], '+.3f')}" for kind in studies[0]["shift"]]
        chosen = collections.Counter(_in_words(study["chosen"]) for study in studies)
        rows.append(
            (
                name,
                "; ".join(f"{text} ({count})" if len(chosen) > 1 else text for text, count in chosen.items()),
                _paired_difference(found["nll"], "+.4f"),
                _paired_difference(found["ece"], "+.2f"),
                ", ".join(f"{text.split(', ')[1]} {_paired_difference(found[text], '+.1f', -1)}" for text in areas),
                ", ".join(shifts),
            )
        )
    headings = ("network", "chosen", "NLL", "ECE %", "AUROC %, entropy", "NLL under shift")
    return Table("autofit minus temperature scaling", headings, tuple(rows))


def _in_words(chosen: Mapping[str, Any] | None) -> str:
    if chosen is None:
        return "none: temperature scaling with a small T_c"
    structure = "" if chosen["structure"] in chosen["parameters"] else f", {chosen['structure']}"
    return f"{chosen['parameters']}{structure}: {chosen['link']}, prior by {chosen['prior_by']}"


def _paired_difference(difference: Mapping[str, Any], form: str, sign: int = 1) -> str:
    text = format(sign * difference["mean"], form)
    if difference["interval"] is None:
        return text
    low, high = sorted(sign * bound for bound in difference["interval"])
    return f"{text} [{format(low, form)}, {format(high, form)}]"


def fused_table(result: Result) -> Table:
    """Several classifiers: NLL of each way to fuse, and `calibrate_fusion` minus it, paired by input over all runs."""
    cases = [
        (case if len(reports) == 1 else report, found)
        for case, reports in result["pooled"].items()
        if case != "frames"
        for report, found in reports.items()
    ]
    rows = tuple(
        (
            name,
            *(
                cell
                for _, found in cases
                for cell in (f"{found['nll'][name]:.4f}", _difference(found, FUSED, name, "+.4f"))
            ),
        )
        for name in cases[0][1]["nll"]
    )
    headings = tuple(heading for case, _ in cases for heading in (f"NLL, {case} ↓", f"{FUSED} minus it"))
    return Table("Several classifiers of one input", ("method", *headings), rows)


def chosen_table(result: Result) -> Table:
    """What `calibrate_fusion` took in each run, and how long that took."""
    rows = [
        (
            f"{case}, {run['seed']}",
            run["cases"][case][FUSED]["chosen"],
            *(f"{run['cases'][case][FUSED]['numbers'][key]:.3g}" for key in ("temperature", "covariance_scale")),
            f"{run['cases'][case][FUSED]['seconds']:.1f}",
        )
        for case in result["runs"][0]["cases"]
        for run in result["runs"]
    ]
    return Table("What calibrate_fusion took", ("case, run", "variant", "T", "q", "seconds"), tuple(rows))


def track_table(result: Result) -> Table:
    """Frames: NLL after so many of each way to fuse, and `Track` minus it, paired by sequence over all runs."""
    found = result["pooled"]["frames"]
    rows = tuple(
        (
            name,
            *(
                cell
                for at in found.values()
                for cell in (f"{at['nll'][name]:.4f}", _difference(at, TRACK, name, "+.4f"))
            ),
        )
        for name in next(iter(found.values()))["nll"]
    )
    headings = tuple(heading for length in found for heading in (f"NLL, {length} ↓", f"{TRACK} minus it"))
    return Table("Frames of one object", ("method", *headings), rows)


def change_table(result: Result) -> Table:
    """An object that becomes another one within the track."""
    runs = [run["frames"]["change"] for run in result["runs"]]
    rows = [
        (f"AUROC % of the first frame by {name}", mean_and_deviation([100 * run["auroc"][name] for run in runs], ".1f"))
        for name in runs[0]["auroc"]
    ]
    for place, first in enumerate(runs[0]["levels"]):
        each = [run["levels"][place] for run in runs]
        for key, title, factor, form in (
            ("noticed", "changes noticed, %", 100, ".1f"),
            ("at_once", "at the first frame, %", 100, ".1f"),
            ("delay", "frames until noticed", 1, ".2f"),
            ("false_alarms", "tracks without a change and with an alarm, %", 100, ".1f"),
        ):
            values = [factor * one[key] for one in each if one[key] is not None]
            cell = mean_and_deviation(values, form) if values else "–"
            rows.append((f"p-value below {first['level']:g}: {title}", cell))
    return Table("An object that changes within the track", ("measure", "mean ± deviation over the runs"), tuple(rows))


def acquisition_table(result: Result) -> Table:
    """Accuracy after some rounds by each rule, and its mean over the rounds less that of random choice."""
    labels, rounds = result["runs"][0]["acquired"]["labels"], len(result["runs"][0]["acquired"]["labels"]) - 1
    shown = sorted({1, rounds // 4, rounds // 2, rounds} - {0})
    rows = []
    for rule, found in acquiring.summary(result["runs"]).items():
        cells = (mean_and_deviation([own[number] for own in found["accuracy"]], ".2f") for number in shown)
        mean, interval = found["minus_random"]["mean"], found["minus_random"]["interval"]
        inside = "" if interval is None else f" [{interval[0]:+.2f}, {interval[1]:+.2f}]"
        rows.append((rule.replace("_", " "), *cells, "" if rule == "random" else f"{mean:+.2f}{inside}"))
    headings = ("rule", *(f"{labels[number]} labels" for number in shown), "mean over the rounds, minus random")
    return Table("Accuracy %, by the rule that chose the labels", headings, tuple(rows))


def _difference(found: Mapping[str, Any], first: str, other: str, form: str) -> str:
    if first == other:
        return ""
    mean, half = found["minus"][first][other]
    return f"{mean:{form}} [{mean - half:{form}}, {mean + half:{form}}]"


TABLES: dict[str, Callable[[Result], Table]] = {
    "scores": score_table,
    "fitted": fitted_table,
    "outliers": outlier_table,
    "shift": shift_table,
    "paired": paired_table,
    "structures": structure_table,
    "cost": cost_table,
    "fusion": fusion_table,
    "decisions": decision_table,
    "classifiers": classifier_table,
    "cleaning": cleaning_table,
    "retraining": retraining_table,
    "autofit": autofit_table,
    "fused": fused_table,
    "chosen": chosen_table,
    "tracks": track_table,
    "change": change_table,
    "acquisition": acquisition_table,
}


def available(result: Result) -> list[str]:
    """The tables for which this result has values."""
    run = result["runs"][0]
    needs = {
        **dict.fromkeys(("scores", "fitted", "paired"), "scores"),
        **{name: name for name in ("outliers", "shift", "structures", "cost", "cleaning")},
        **dict.fromkeys(("fusion", "decisions", "classifiers"), "fusion"),
        "retraining": "cleaning",
        **dict.fromkeys(("fused", "chosen"), "cases"),
        **dict.fromkeys(("tracks", "change"), "frames"),
        "acquisition": "acquired",
    }
    # That of `autofit` is of all experiments together.
    return [name for name in TABLES if name in needs and run.get(needs[name])]


def fill(text: str, results: Mapping[str, Result]) -> str:
    """The document with each marked table written from its result."""

    def table(match: re.Match[str]) -> str:
        experiment, name = match.group(1), match.group(2)
        if experiment not in results or name not in TABLES:
            raise ArgumentError(f"The document asks for the table {name!r} of {experiment!r}, which does not exist.")
        return f"<!-- table: {experiment} {name} -->\n{TABLES[name](results[experiment]).markdown()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\S+) (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


def refresh(page: Path, folder: Path) -> None:
    """Rewrite the tables of a document from the result files of a folder."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    write_file(page, fill(page.read_text(encoding="utf-8"), results).encode())


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    mean = format(statistics.fmean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean


def _interval(first: Sequence[float], second: Sequence[float], form: str) -> str:
    difference = paired(first, second)
    text = format(difference["mean"], form)
    if difference["interval"] is None:
        return text
    low, high = (format(bound, form) for bound in difference["interval"])
    return f"{text} [{low}, {high}]"
