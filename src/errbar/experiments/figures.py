"""The figures of an experiment, drawn from its result file alone.

Each is a function from a result to a `Figure`, or to None where the result has nothing for it. Widths are those of a
two-column paper, 3.3 or 7 inches. A method looks the same in all of them: `figure_values.looks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar import LogitGaussian, plots
from errbar.errors import DataError
from errbar.experiments import acquiring
from errbar.experiments import figure_values as values
from errbar.experiments.evaluation import paired
from errbar.experiments.figure_values import Result
from errbar.plots import BLUE, GREY, INK, ORANGE, VERMILION, Style
from errbar.plots.curves import DASHED, DASHES, SMALL, TEXT, key_below, key_height, new_figure, plain, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 7.0
_LABELS = {"nll": "NLL", "ece": "ECE (%)", "accuracy": "accuracy (%)"}
_UNITS = {"nll": 1.0, "ece": 1.0, "accuracy": 100.0}
_FUSION_UNITS = {**_UNITS, "ece": 100.0}
# Pictures of a sequence that fit side by side.
_STRIP = 10
# Inches in the key of ROC curves: an AUROC with its deviation, and a letter of a name.
_AREA_WIDTH, _LETTER_WIDTH = 0.93, 0.059
_NARROW: dict[str, Any] = {"width": 22, "max_lines": 2, "placeholder": "…"}


def draw(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Every figure for which the result has values, in `folder` as PDF and PNG, e.g. mnist-reliability.png.

    The files depend on the result and on nothing else: the same result gives the same bytes.
    """
    result = values.checked(result)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['experiment']}-quick" if result.get("quick") else result["experiment"]
    files = []
    for name, make in FIGURES.items():
        figure = make(result)
        if figure is not None:
            files += _save(figure, folder / f"{stem}-{name}")
    return files


def _save(figure: Figure, stem: Path) -> list[Path]:
    import matplotlib

    pdf, png = stem.with_name(f"{stem.name}.pdf"), stem.with_name(f"{stem.name}.png")
    # The layout is made once, for both.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    # Type 42 embeds the fonts as outlines that can be searched and edited; many journals refuse the default, type 3.
    with matplotlib.rc_context({"pdf.fonttype": 42}):
        write_figure(figure, pdf, metadata={"CreationDate": None})
        write_figure(figure, png, dpi=200)
    return [pdf, png]


def reliability(result: Result, *, everything: bool = False) -> Figure | None:
    """Reliability diagrams, the predictions of all seeds pooled: of the paper's six methods, or of all."""
    diagrams = values.reliability(result)
    chosen = [method for method in diagrams if everything or method in values.PAPER]
    if not chosen or (everything and set(chosen) <= set(values.PAPER)):
        return None  # nothing, or nothing that the paper's six methods do not show already
    named = {values.name_of(result, method): diagrams[method] for method in chosen}
    return plots.diagram_grid(
        {name: pooled.diagram for name, pooled in named.items()},
        notes={name: pooled.note for name, pooled in named.items()},
        columns=min(len(named), 3 if len(named) <= 9 else 4),
        width=PAGE if len(named) > 1 else COLUMN,
    )


def illustration(result: Result) -> Figure | None:
    """The paper's first figure: images, P^g in the plane of the two leading classes, PMFs with error bars."""
    rows = result.get("illustration")
    if not rows:
        return None
    covariance = torch.stack([values.numbers(row["covariance"]) for row in rows])
    # In float32, the precision of the network: what was rounded to it is positive semi-definite to that rounding.
    gaussian = LogitGaussian(
        torch.stack([values.numbers(row["mean"]) for row in rows]).float(), ((covariance + covariance.mT) / 2).float()
    )
    names = result.get("class_names")
    labels = [row.get("label") for row in rows]
    titles = ["" if label is None else fill(f"label {_class(names, label)}", **_NARROW) for label in labels]
    images = torch.stack([_picture(row["image"]) for row in rows])
    return plots.figure_one(images, gaussian, gaussian.predict(), titles=titles, names=names)


def _class(names: Sequence[str] | None, label: int) -> str:
    return str(label) if names is None else names[label]


def _picture(image: Any) -> Float[Tensor, "H W *rgb"]:
    """C × H × W as matplotlib wants it: grey without the channel, colours with the channel last."""
    pixels = values.numbers(image)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        raise DataError(f"An image has shape {tuple(pixels.shape)}; expected (1, H, W), grey, or (3, H, W), RGB.")
    return pixels[0] if len(pixels) == 1 else pixels.movedim(0, 2).clamp(0, 1)


def shift(result: Result, *, everything: bool = False) -> Figure | None:
    """One row per measure, one column per kind of shift; of the main methods, or of all where these are more."""
    kinds = values.shifts(result)
    found_methods = dict.fromkeys(m for kind in kinds.values() for each in kind.measures.values() for m in each)
    methods = values.shown(list(found_methods), everything=everything)
    rows = [measure for measure in values.MEASURES if any(measure in kind.measures for kind in kinds.values())]
    if not methods:
        return None
    looks = values.looks(result)
    names = [values.name_of(result, method) for method in methods]
    width = PAGE if len(kinds) > 1 else COLUMN
    figure = new_figure((width, 1.4 * len(rows) + 0.4 + key_height(names, width)))
    grid = figure.subplots(len(rows), len(kinds), squeeze=False, sharex="col")
    for column, (kind, shift_values) in enumerate(kinds.items()):
        for row, measure in enumerate(rows):
            ax = grid[row, column]
            by_method = shift_values.measures.get(measure)
            if by_method is None:
                ax.axis("off")
                continue
            named = {values.name_of(result, m): _UNITS[measure] * by_method[m] for m in methods if m in by_method}
            plots.shift(shift_values.severity, named, kind="", measure="", looks=looks, key=False, ax=ax)
            if column == 0:
                ax.set_ylabel(_LABELS[measure], fontsize=TEXT)
            if measure != "accuracy":
                ax.set_ylim(bottom=0)
        label = kind.replace("_", " ")
        grid[-1, column].set_xlabel(f"{label} (degrees)" if kind == "rotation" else label, fontsize=TEXT)
    # Percentages have one scale in a row. The NLL has no bound, and one kind would press the others flat.
    for row, measure in enumerate(rows):
        if measure != "nll":
            _one_scale([ax for ax in grid[row] if ax.axison])
    figure.align_ylabels()
    key_below(figure, names, looks)
    return figure


def _one_scale(row: Sequence[Axes]) -> None:
    limits = [ax.get_ylim() for ax in row]
    for ax in row:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        ax.tick_params(labelleft=ax is row[0])


def roc(result: Result) -> Figure | None:
    """One panel per dataset, one curve per score; the key is a table of the AUROCs."""
    datasets = values.roc_curves(result)
    if not datasets:
        return None
    labels = list(dict.fromkeys(label for curves in datasets.values() for label in curves))
    looks = _score_looks(result, labels)
    # One dataset has the table beside it, several have it below.
    alone, columns = len(datasets) == 1, min(len(datasets), 4)
    rows = -(-len(datasets) // columns)
    lines = 0.17 * (len(labels) + 1)
    if alone:
        figure = new_figure((PAGE, max(2.7, lines)))
        table = _table_width(result, labels)
        grid = figure.add_gridspec(1, 2, width_ratios=(PAGE - table, table))
        panels, place = [figure.add_subplot(grid[0, 0])], figure.add_subplot(grid[0, 1])
    else:
        height = PAGE / columns + 0.3
        figure = new_figure((PAGE, rows * height + lines))
        grid = figure.add_gridspec(rows + 1, columns, height_ratios=(*[height] * rows, lines))
        panels = [figure.add_subplot(grid[n // columns, n % columns]) for n in range(len(datasets))]
        place = figure.add_subplot(grid[rows, :])
    for number, (ax, (dataset, curves)) in enumerate(zip(panels, datasets.items(), strict=True)):
        plots.roc({label: (c.x, c.y) for label, c in curves.items()}, looks=looks, key=False, ax=ax)
        ax.set_title(dataset, fontsize=TEXT, color=INK)
        if number % columns:
            ax.set_ylabel("")
    _area_table(place, result, datasets, looks)
    return figure


def _score_looks(result: Result, labels: Sequence[str]) -> dict[str, Style]:
    """The colour and marker of the method; with several scores per method, the dash distinguishes the scores."""
    looks = values.looks(result)
    parts = {label: values.method_and_score(result, label) for label in labels}
    others = plots.styles([*looks, *(method for method, _ in parts.values())])
    scores = list(dict.fromkeys(score for _, score in parts.values()))
    by_label = {}
    for label, (method, score) in parts.items():
        style = looks.get(method, others[method])
        by_label[label] = style if len(scores) == 1 else style._replace(dash=DASHES[scores.index(score) % len(DASHES)])
    return by_label


def _table_width(result: Result, labels: Sequence[str]) -> float:
    """Inches that the longest row of the key takes: its line, its name, its AUROC."""
    longest = max(len(" · ".join(values.method_and_score(result, label))) for label in labels)
    return max(4.4, 0.6 + _LETTER_WIDTH * longest + _AREA_WIDTH)


def _area_table(
    ax: Axes, result: Result, datasets: Mapping[str, Mapping[str, values.MeanCurve]], looks: Mapping[str, Style]
) -> None:
    """A key with a row for each curve, and its AUROC for each dataset in columns."""
    from matplotlib.lines import Line2D

    several = len(datasets) > 1
    table = _table_width(result, list(looks))
    first, width = (0.5, 0.07) if several else (1 - _AREA_WIDTH / table, 0.5 / table)
    step = (1 - first) / len(datasets)
    lines = len(looks) + 1 if several else max(len(looks) + 1, 13)
    heights = [0.5 + (0.5 * (len(looks) + 1) - row - 0.5) / lines for row in range(len(looks) + 1)]
    place: dict[str, Any] = {"transform": ax.transAxes, "fontsize": SMALL, "color": INK, "va": "center"}
    ax.axis("off")
    for column, (dataset, curves) in enumerate(datasets.items()):
        x = first + (column + 0.5) * step
        ax.text(x, heights[0], dataset if several else "AUROC", ha="center", **place)
        for y, label in zip(heights[1:], looks, strict=True):
            if label in curves:
                # With many columns there is no room for the spread.
                areas = curves[label].areas if len(datasets) <= 4 else curves[label].areas.mean()[None]
                ax.text(x, y, values.plus_minus(areas, 3), ha="center", **place)
    if several:
        ax.text(width + 0.02, heights[0], "AUROC", **place)
    for y, (label, style) in zip(heights[1:], looks.items(), strict=True):
        line = Line2D([0.0, width / 2, width], [y] * 3, transform=ax.transAxes, markevery=[1], **style.line())
        ax.add_line(line)
        method, score = values.method_and_score(result, label)
        ax.text(width + 0.02, y, f"{method} · {score}" if score else method, **place)
    ax.set(xlim=(0, 1), ylim=(0, 1))


def risk_coverage(result: Result) -> Figure | None:
    """The errors that remain if the classifiers may abstain; means over the seeds."""
    mean_curves = values.risk_coverage(result)
    curves = {values.name_of(result, m): mean_curves[m] for m in values.shown(list(mean_curves), everything=False)}
    if not curves:
        return None
    looks = values.looks(result)
    figure = new_figure((COLUMN, 2.2 + key_height(curves, COLUMN)))
    plots.risk_coverage(curves, looks=looks, key=False, ax=figure.subplots())
    key_below(figure, curves, looks)
    return figure


def covariance_scale(result: Result) -> Figure | None:
    """NLL and ECE against T_c: a thin line for each seed, a bold one for the mean, marks at what was chosen."""
    curves = values.scale_curves(result)
    if curves is None:
        return None
    from matplotlib.lines import Line2D

    marks: dict[str, dict[str, Any]] = {
        "nll": {"marker": "o", "color": VERMILION, "markersize": 5},
        "ece": {"marker": "D", "color": ORANGE, "markersize": 4.5},
    }
    edge: dict[str, Any] = {"linestyle": "none", "markeredgecolor": INK, "markeredgewidth": 0.6}
    mean: dict[str, Any] = {"color": BLUE, "linewidth": 2.0}
    seed: dict[str, Any] = {"color": GREY, "linewidth": 0.8}
    figure = new_figure((COLUMN, 4.0))
    panels = figure.subplots(2, 1, sharex=True)
    scale, several = curves.scale.tolist(), len(curves.measures["nll"]) > 1
    for ax, (measure, runs) in zip(panels, curves.measures.items(), strict=True):
        unit = _UNITS[measure]
        for run in runs if several else ():
            ax.plot(scale, (unit * run).tolist(), **seed)
        ax.plot(scale, (unit * runs.mean(0)).tolist(), **mean)
        ax.axvline(1.0, color=INK, linewidth=0.8, linestyle=DASHED, zorder=0)
        for by, mark in marks.items():
            heights = (unit * curves.at_chosen(measure, by)).tolist()
            ax.plot(curves.chosen[by].tolist(), heights, clip_on=False, **mark, **edge)
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ax.set_ylabel(_LABELS[measure], fontsize=TEXT)
        plain(ax)
    place = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    panels[0].annotate("$T_c = 1$", (1, 1), (0, 2), xycoords=panels[0].get_xaxis_transform(), fontsize=SMALL, **place)
    panels[1].set_xlabel("covariance scale $T_c$", fontsize=TEXT)
    handles = [Line2D([], [], label=f"chosen by {by.upper()}", **mark, **edge) for by, mark in marks.items()]
    if several:
        handles = [Line2D([], [], label="mean", **mean), Line2D([], [], label="each seed", **seed), *handles]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL)
    figure.align_ylabels()
    return figure


def fusion(result: Result) -> Figure | None:
    """Scores against the number of frames fused, and one sequence frame by frame with the result of each method."""
    part = result.get("fusion", {})
    curves, strip = part.get("sequences"), part.get("strip")
    heights = ([1.9] if curves else []) + ([0.75, 1.3] if strip else [])
    if not heights:
        return None
    figure = new_figure((PAGE, sum(heights) + 0.5))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    looks = values.looks(result)
    if curves:
        panels = grid[0].subgridspec(1, 3)
        for column, measure in enumerate(("accuracy", "nll", "ece")):
            ax = figure.add_subplot(panels[column])
            named = {
                values.readable(name): _FUSION_UNITS[measure] * values.numbers([scores[measure]])
                for name, scores in curves["methods"].items()
                if measure in scores
            }
            if not named:
                ax.axis("off")
                continue
            label = _LABELS[measure]
            plots.shift(curves["frames"], named, kind="frames fused", measure=label, looks=looks, key=False, ax=ax)
            ax.set_xticks(_frame_ticks(curves["frames"]))
            if measure != "accuracy":
                ax.set_ylim(bottom=0)
    if strip:
        below = figure.add_subplot(grid[-1])
        _strip(figure.add_subplot(grid[-2], sharex=below), below, strip, looks, result.get("class_names"))
    key_below(figure, map(values.readable, values.fusion_names(result)), looks)
    return figure


def acquisition(result: Result) -> Figure | None:
    """Accuracy against the number of labels: the mean over the runs, with its 95 % interval as a band."""
    runs = result["runs"]
    if not runs or "acquired" not in runs[0]:
        return None
    labels = runs[0]["acquired"]["labels"]
    curves = {rule.replace("_", " "): found["accuracy"] for rule, found in acquiring.summary(runs).items()}
    looks = plots.styles(curves)
    figure = new_figure((PAGE, 3.2 + key_height(curves, PAGE)))
    ax = figure.subplots()
    for name, each in curves.items():
        columns = list(zip(*each, strict=True))
        middle = [sum(column) / len(column) for column in columns]
        ax.plot(labels, middle, label=name, **looks[name].line())
        if len(each) > 1:
            bounds = [paired(column, [0.0] * len(column))["interval"] for column in columns]
            low, high = zip(*bounds, strict=True)
            ax.fill_between(labels, low, high, color=looks[name].color, alpha=0.12, linewidth=0)
    ax.set_xlabel("labels", fontsize=TEXT)
    ax.set_ylabel(_LABELS["accuracy"], fontsize=TEXT)
    plain(ax)
    key_below(figure, curves, looks)
    return figure


def _frame_ticks(frames: Sequence[int]) -> list[int]:
    """The first frame and round numbers, at most eight in all."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, len(frames)) if len(frames) <= 7 * step)
    return [frame for frame in frames if frame == frames[0] or frame % step == 0]


def _strip(
    above: Axes, below: Axes, strip: Mapping[str, Any], looks: Mapping[str, Style], names: Sequence[str] | None
) -> None:
    """Frames of one sequence, and under each the probability of the class that each method considers most likely."""
    images, label = strip["images"], strip["label"]
    frames = range(1, len(images) + 1)
    stride = math.ceil(len(images) / _STRIP)
    pictures, half = frames[::stride], 0.46 * stride
    for frame in pictures:
        ax = above.inset_axes((frame - half, 0.0, 2 * half, 1.0), transform=above.transData)
        ax.imshow(_picture(images[frame - 1]).numpy(), cmap="gray_r", interpolation="nearest")
        ax.axis("off")
    above.axis("off")
    for name, pmf in strip["pmf"].items():
        probability, best = values.numbers(pmf).max(1)
        look = looks[values.readable(name)]
        below.plot(frames, probability.tolist(), color=look.color, linestyle=look.dash, linewidth=1.2)
        for right in (True, False):
            some = [frame for frame in frames if (int(best[frame - 1]) == label) == right]
            face: dict[str, Any] = {"markerfacecolor": look.color if right else "white", "markeredgecolor": look.color}
            heights = [float(probability[frame - 1]) for frame in some]
            below.plot(some, heights, linestyle="none", marker=look.marker, markersize=4.5, **face)
    below.set(ylim=(0, 1.04), yticks=(0, 0.5, 1), xticks=pictures)
    below.set_xlim(1 - half, max(pictures[-1] + half, len(images) + 0.46))
    truth = shorten(_class(names, label), 30, placeholder="…")
    below.set_xlabel(f"frame of a sequence labelled {truth}; open marks: another class on top", fontsize=TEXT)
    below.set_ylabel("top probability", fontsize=TEXT)
    plain(below)


FIGURES: dict[str, Callable[[Result], Figure | None]] = {
    "reliability": reliability,
    "reliability-all": partial(reliability, everything=True),
    "figure-one": illustration,
    "shift": shift,
    "shift-all": partial(shift, everything=True),
    "roc": roc,
    "risk-coverage": risk_coverage,
    "covariance-scale": covariance_scale,
    "fusion": fusion,
    "acquisition": acquisition,
}
