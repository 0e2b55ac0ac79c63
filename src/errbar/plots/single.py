"""Figures of one method or one input: reliability diagrams, PMFs, and logits in a plane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar.errors import ArgumentError
from errbar.plots.curves import (
    BLUE,
    DARK_ORANGE,
    DASHED,
    GREY,
    INK,
    ORANGE,
    SKY,
    SMALL,
    TEXT,
    VERMILION,
    new_axes,
    new_figure,
    plain,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from errbar._distributions.logits import LogitGaussian
    from errbar._distributions.prediction import Prediction

OVERCONFIDENT: dict[str, Any] = {"facecolor": "#F9DFCC", "edgecolor": VERMILION, "hatch": "/////", "linewidth": 0.6}
UNDERCONFIDENT: dict[str, Any] = {"facecolor": SKY, "edgecolor": "white", "linewidth": 0.8}
# More class labels than this do not fit under the bars of a PMF.
_CLASS_LABELS = 15


def reliability(
    pmf: Float[Tensor, "N M"],
    labels: Int[Tensor, " N"],
    *,
    bins: int = 10,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Reliability diagram: the accuracy of the predictions, bin by bin of their confidence max_m f_m.

    Vermilion, hatched, is the gap by which the confidence exceeds the accuracy of a bin, sky blue the gap by
    which it falls short: the |acc(B_j) − conf(B_j)| that the ECE averages. Bins of fewer than 20 predictions are
    fainter, and the histogram on top shows the counts (square-root scale): a gap among three means little.
    """
    return diagram(metrics.reliability(pmf, labels, bins=bins), ax=ax, title=title)


def diagram(
    values: metrics.Reliability, *, ax: Axes | None = None, title: str | None = None, note: str | None = None
) -> Axes:
    """The diagram of `reliability` from its values; `note` replaces the text of its ECE."""
    if ax is None:
        ax = new_axes((3.2, 3.6))
        title = None if title is None else wrapped(title, 2.4, TEXT)
    counts = [int(count) for count in values.count]
    width = 1.0 / len(counts)
    for number, count in enumerate(counts):
        if count == 0:
            continue
        accuracy, confidence = float(values.accuracy[number]), float(values.confidence[number])
        gap = OVERCONFIDENT if confidence > accuracy else UNDERCONFIDENT
        low, high = sorted((accuracy, confidence))
        place: dict[str, Any] = {"x": number * width, "width": width, "align": "edge"}
        place["alpha"] = 0.3 + 0.7 * min(1.0, count / 20)
        ax.bar(height=low, color=BLUE, edgecolor="white", linewidth=0.8, **place)
        ax.bar(height=high - low, bottom=low, **gap, **place)
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1.0, linestyle=DASHED)
    error = float((values.count * values.gap).sum() / values.count.sum())
    note = f"ECE {100 * error:.1f} %" if note is None else note
    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
    ax.text(0.95, 0.05, note, transform=ax.transAxes, horizontalalignment="right", fontsize=SMALL, bbox=box)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set_xlabel("confidence", fontsize=TEXT)
    ax.set_ylabel("accuracy", fontsize=TEXT)
    plain(ax)

    histogram = ax.inset_axes((0.0, 1.02, 1.0, 0.13), sharex=ax)
    edges = [number * width for number in range(len(counts))]
    roots = [math.sqrt(count) for count in counts]
    histogram.bar(edges, roots, width, align="edge", color=GREY, edgecolor="white")
    histogram.axis("off")
    if title is not None:
        histogram.set_title(title, fontsize=TEXT, color=INK, pad=4)
    return ax


def reliability_grid(
    pmfs: Mapping[str, Float[Tensor, "N M"]], labels: Int[Tensor, " N"], *, bins: int = 10, columns: int = 4
) -> Figure:
    """Reliability diagrams of several methods, name → PMFs, side by side."""
    diagrams = {name: metrics.reliability(values, labels, bins=bins) for name, values in pmfs.items()}
    return diagram_grid(diagrams, columns=columns)


def diagram_grid(
    diagrams: Mapping[str, metrics.Reliability],
    *,
    notes: Mapping[str, str] | None = None,
    columns: int = 4,
    width: float | None = None,
) -> Figure:
    """Several diagrams, name → values, side by side; `width` in inches is that of the whole figure."""
    if not diagrams:
        raise ArgumentError("There is nothing to draw; expected a mapping from names to PMFs.")
    columns = min(columns, len(diagrams))
    rows = -(-len(diagrams) // columns)
    side = 2.6 if width is None else width / columns
    titles = [wrapped(title, side - 0.5, TEXT) for title in diagrams]
    breaks = [
        max(title.count("\n") for title in titles[start : start + columns]) for start in range(0, len(titles), columns)
    ]
    height = (side + 0.4) * rows if width is None else 1.12 * side * rows + 0.6
    height += 0.15 * sum(breaks)
    figure = new_figure((side * columns, height))
    places = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for number, (ax, (title, values)) in enumerate(zip(places, diagrams.items(), strict=False)):
        diagram(values, ax=ax, title=titles[number], note=None if notes is None else notes[title])
        if side < 2:
            ax.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
        # Outer labels only: the same words and numbers seven times are clutter.
        if number % columns:
            ax.set_ylabel("")
            ax.tick_params(labelleft=False)
        if number + columns < len(diagrams):
            ax.set_xlabel("")
            ax.tick_params(labelbottom=False)
    for ax in places[len(diagrams) :]:
        ax.axis("off")
    _key(figure, places[len(diagrams)] if len(places) > len(diagrams) else None)
    return figure


def _key(figure: Figure, place: Axes | None) -> None:
    """What the colours mean: in an empty place of the grid, or below it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=BLUE, label="accuracy"),
        Patch(label="over-confident by", **OVERCONFIDENT),
        Patch(label="under-confident by", **UNDERCONFIDENT),
        Line2D([], [], color=INK, linewidth=1.0, linestyle=DASHED, label="calibrated"),
        Patch(facecolor=GREY, label="predictions"),
    ]
    looks: dict[str, Any] = {"handles": handles, "frameon": False, "fontsize": SMALL, "handlelength": 1.6}
    if place is not None:
        place.legend(loc="center left", **looks)
    else:
        columns = 5 if figure.get_figwidth() > 6 else 2
        figure.legend(loc="outside lower center", ncols=columns, columnspacing=1.4, **looks)


def pmf(
    prediction: Prediction,
    index: int = 0,
    *,
    level: float = 0.95,
    highlight: tuple[int, ...] = (),
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The PMF of one input as bars, each with its equal-tailed interval at `level`.

    `highlight` names up to two classes to draw in blue and orange; without it all bars are blue.
    """
    ax = new_axes((3.6, 2.4)) if ax is None else ax
    index = _checked_index(index, len(prediction.pmf))
    probabilities = prediction.pmf[index].tolist()
    lower, upper = (bound[index].tolist() for bound in prediction.interval(level))
    classes = range(len(probabilities))
    colours = [GREY if highlight else BLUE for _ in classes]
    for number, colour in zip(highlight, (BLUE, ORANGE), strict=False):
        colours[number] = colour
    ax.bar(classes, probabilities, 0.72, color=colours)
    # Lines instead of errorbar(): the mean of a very skewed sample may lie outside its equal-tailed interval.
    ax.vlines(classes, lower, upper, color=INK, linewidth=1.1)
    for bound in (lower, upper):
        ax.hlines(bound, [c - 0.16 for c in classes], [c + 0.16 for c in classes], color=INK, linewidth=1.1)
    ax.set(ylim=(0, 1.02), yticks=(0, 0.5, 1))
    ax.set_xlabel("class", fontsize=TEXT)
    ax.set_ylabel("probability", fontsize=TEXT)
    plain(ax)
    _class_ticks(ax, len(classes), highlight, names)
    return ax


def _class_ticks(ax: Axes, classes: int, highlight: tuple[int, ...], names: Sequence[str] | None) -> None:
    """The classes below their bars; of very many only every fifth, and the highlighted ones by name on top."""
    if classes > _CLASS_LABELS:
        ax.set_xticks(range(0, classes, 5))
        places = ((0.0, "left", BLUE), (1.0, "right", DARK_ORANGE))
        for number, (x, side, colour) in zip(highlight, places, strict=False):
            label = str(number) if names is None else shorten(f"{number} {names[number]}", 24, placeholder="…")
            ax.text(x, 1.02, label, transform=ax.transAxes, ha=side, va="bottom", fontsize=SMALL, color=colour)
        return
    labels = [str(number) for number in range(classes)] if names is None else list(names)
    long = max(map(len, labels)) > 3
    turn: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
    ax.set_xticks(range(classes), labels, **turn)
    if long:
        ax.set_xlabel("")


def logit_ellipse(
    gaussian: LogitGaussian,
    index: int = 0,
    *,
    classes: tuple[int, int],
    samples: int = 300,
    seed: int = 0,
    limits: tuple[float, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """P^g of one input, seen in the plane of two logits: ellipses of 1 and 2 σ, samples, the line g_i = g_j.

    Drawn from `gaussian.centered()`: the softmax ignores a common shift of the logits, and with `fisher="ggn"`
    the variance of that shift is huge and means nothing. Samples on the side of class i are blue, the others
    orange.
    """
    ax = new_axes((3.0, 3.0)) if ax is None else ax
    from matplotlib.patches import Ellipse  # after the line above, which says so when matplotlib is missing

    view = plane_of(gaussian, _checked_index(index, len(gaussian)), classes)
    first, second = view.sample(samples, seed)
    colours = [BLUE if a > b else ORANGE for a, b in zip(first, second, strict=True)]
    ax.scatter(first, second, s=5, c=colours, alpha=0.45, linewidths=0)
    for sigma, width in ((1, 1.2), (2, 0.8)):
        axes = 2 * sigma * view.major, 2 * sigma * view.minor
        ellipse = Ellipse(view.mean, *axes, angle=math.degrees(view.angle), fill=False, edgecolor=INK, linewidth=width)
        ax.add_patch(ellipse)
    ax.plot(*view.mean, marker="+", color=INK, markersize=6)
    low, high = limits if limits is not None else _limits([view])
    ax.plot([low, high], [low, high], color=INK, linewidth=1.0, linestyle=DASHED)
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.locator_params(nbins=5)  # the same ticks on both axes
    i, j = classes
    along: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "ha": "center", "va": "bottom"}
    ax.text(0.84, 0.87, f"$g_{{{i}}} = g_{{{j}}}$", transform=ax.transAxes, fontsize=SMALL, color=INK, **along)
    ax.set_xlabel(rf"$g_{{{i}}} - \bar g$", fontsize=TEXT, color=BLUE)
    ax.set_ylabel(rf"$g_{{{j}}} - \bar g$", fontsize=TEXT, color=DARK_ORANGE)
    plain(ax)
    return ax


def figure_one(
    images: Float[Tensor, "R H W *rgb"],
    gaussian: LogitGaussian,
    prediction: Prediction,
    *,
    classes: Sequence[tuple[int, int]] | None = None,
    titles: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    samples: int = 300,
    seed: int = 0,
) -> Figure:
    """The paper's first figure: one row per input, with the image, P^g for two classes, and the PMF.

    Images are grey (drawn dark on light) or have red, green and blue in [0, 1] as a last dimension. `classes` says
    which two logits each row shows; without it the two most probable. All ellipses have the same scale, so that
    their sizes can be compared. `names` are those of the classes.
    """
    rows = len(images)
    if not rows == len(gaussian) == len(prediction.pmf):
        raise ArgumentError(
            "figure_one draws one row per input and needs as many images as logits and predictions; "
            f"got {rows}, {len(gaussian)} and {len(prediction.pmf)}."
        )
    if classes is None:
        classes = [(int(i), int(j)) for i, j in prediction.pmf.topk(2).indices.tolist()]
    # Names of classes stand at an angle below the bars.
    longest = 0 if names is None or len(names) > _CLASS_LABELS else max(map(len, names))
    figure = new_figure((7.0, (2.0 + 0.04 * longest) * rows))
    grid = figure.subplots(rows, 3, squeeze=False, width_ratios=(0.8, 1.0, 1.7))
    limits = _limits([plane_of(gaussian, row, pair) for row, pair in enumerate(classes)])
    for row, pair in enumerate(classes):
        picture, plane, bars = grid[row]
        picture.imshow(images[row].detach().cpu().numpy(), cmap="gray_r", interpolation="nearest")
        picture.set(xticks=[], yticks=[])
        for spine in picture.spines.values():
            spine.set_edgecolor(GREY)
        if titles is not None:
            picture.set_title(wrapped(titles[row], 1.1, TEXT), fontsize=TEXT, color=INK)
        logit_ellipse(gaussian, row, classes=pair, samples=samples, seed=seed, limits=limits, ax=plane)
        pmf(prediction, row, highlight=pair, names=names, ax=bars)
        if row < rows - 1:
            bars.set_xlabel("")
    return figure


class Plane(NamedTuple):
    """A Gaussian in the plane of two logits, by the axes of its ellipse: Cov = Q diag(major², minor²) Qᵀ."""

    mean: tuple[float, float]
    major: float
    minor: float
    angle: float

    def sample(self, samples: int, seed: int) -> tuple[list[float], list[float]]:
        draws = torch.randn(2, samples, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        along, across = self.major * draws[0], self.minor * draws[1]
        cosine, sine = math.cos(self.angle), math.sin(self.angle)
        first = self.mean[0] + cosine * along - sine * across
        second = self.mean[1] + sine * along + cosine * across
        return first.tolist(), second.tolist()


def plane_of(gaussian: LogitGaussian, index: int, classes: tuple[int, int]) -> Plane:
    """The centred logits of one input in the plane of two classes."""
    pair = torch.tensor([classes], device=gaussian.mean.device)
    centered = gaussian[index : index + 1].centered().of_classes(pair)
    mean, covariance = centered.mean[0].double(), centered.covariance[0].double()
    a, b, c = float(covariance[0, 0]), float(covariance[0, 1]), float(covariance[1, 1])
    middle, radius = (a + c) / 2, math.hypot((a - c) / 2, b)
    return Plane(
        mean=(float(mean[0]), float(mean[1])),
        major=math.sqrt(max(middle + radius, 0.0)),
        minor=math.sqrt(max(middle - radius, 0.0)),
        angle=math.atan2(2 * b, a - c) / 2,
    )


def _limits(planes: Sequence[Plane]) -> tuple[float, float]:
    """One square that holds the 3 σ circles of all."""
    low = min(coordinate - 3 * plane.major for plane in planes for coordinate in plane.mean)
    high = max(coordinate + 3 * plane.major for plane in planes for coordinate in plane.mean)
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _checked_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise ArgumentError(f"index says which input to draw and lies in 0 … {length - 1}; got {index}.")
    return index % length
