"""Figures: values in, matplotlib axes out.

Nothing here touches pyplot or its settings. Without `ax` a new `Figure` is made; save it with
`ax.figure.savefig(path)`, or draw into a pyplot figure by passing `ax=plt.gca()`.

Colours (Okabe and Ito's, safe for the colour-blind) mean the same everywhere: blue the accuracy or the first
class, orange the second class, vermilion the error, grey the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from errbar import metrics
from errbar.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from errbar.logits import LogitGaussian
    from errbar.prediction import Prediction

BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
GREY, INK = "#B8BCC2", "#262626"
OVERCONFIDENT: dict[str, Any] = {"facecolor": "#F9DFCC", "edgecolor": VERMILION, "hatch": "/////", "linewidth": 0.6}
UNDERCONFIDENT: dict[str, Any] = {"facecolor": SKY, "edgecolor": "white", "linewidth": 0.8}
_SMALL, _TEXT = 8, 9
_DASHED = (0, (4, 3))


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
    ax = _new_axes((3.2, 3.6)) if ax is None else ax
    diagram = metrics.reliability(pmf, labels, bins=bins)
    counts = [int(count) for count in diagram.count]
    width = 1.0 / bins
    for number, count in enumerate(counts):
        if count == 0:
            continue
        accuracy, confidence = float(diagram.accuracy[number]), float(diagram.confidence[number])
        gap = OVERCONFIDENT if confidence > accuracy else UNDERCONFIDENT
        low, high = sorted((accuracy, confidence))
        place: dict[str, Any] = {"x": number * width, "width": width, "align": "edge"}
        place["alpha"] = 0.3 + 0.7 * min(1.0, count / 20)
        ax.bar(height=low, color=BLUE, edgecolor="white", linewidth=0.8, **place)
        ax.bar(height=high - low, bottom=low, **gap, **place)
    ax.plot([0, 1], [0, 1], color=INK, linewidth=1.0, linestyle=_DASHED)
    error = metrics.ece(pmf, labels, bins=bins)
    ax.text(
        0.95,
        0.05,
        f"ECE {100 * float(error):.1f} %",
        transform=ax.transAxes,
        horizontalalignment="right",
        fontsize=_TEXT,
        bbox={"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
    )
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set_xlabel("confidence", fontsize=_TEXT)
    ax.set_ylabel("accuracy", fontsize=_TEXT)
    _plain(ax)

    histogram = ax.inset_axes((0.0, 1.02, 1.0, 0.13), sharex=ax)
    edges = [number * width for number in range(bins)]
    roots = [math.sqrt(count) for count in counts]
    histogram.bar(edges, roots, width, align="edge", color=GREY, edgecolor="white")
    histogram.axis("off")
    if title is not None:
        histogram.set_title(title, fontsize=_TEXT, color=INK, pad=4)
    return ax


def reliability_grid(
    pmfs: Mapping[str, Float[Tensor, "N M"]], labels: Int[Tensor, " N"], *, bins: int = 10, columns: int = 4
) -> Figure:
    """Reliability diagrams of several methods, name → PMFs, side by side."""
    if not pmfs:
        raise ArgumentError("There is nothing to draw; expected a mapping from names to PMFs.")
    rows = -(-len(pmfs) // columns)
    figure = _new_figure((2.6 * columns, 3.0 * rows))
    grid = figure.subplots(rows, columns, squeeze=False)
    places = list(grid.flatten())
    for number, (ax, (title, values)) in enumerate(zip(places, pmfs.items(), strict=False)):
        reliability(values, labels, bins=bins, ax=ax, title=title)
        # Outer labels only: the same two words seven times are clutter.
        if number % columns:
            ax.set_ylabel("")
        if number + columns < len(pmfs):
            ax.set_xlabel("")
    for ax in places[len(pmfs) :]:
        ax.axis("off")
    _key(figure, places[len(pmfs)] if len(places) > len(pmfs) else None)
    return figure


def _key(figure: Figure, place: Axes | None) -> None:
    """What the colours mean: in an empty place of the grid, or below it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=BLUE, label="accuracy"),
        Patch(label="over-confident by", **OVERCONFIDENT),
        Patch(label="under-confident by", **UNDERCONFIDENT),
        Line2D([], [], color=INK, linewidth=1.0, linestyle=_DASHED, label="calibrated"),
        Patch(facecolor=GREY, label="number of predictions"),
    ]
    if place is not None:
        place.legend(handles=handles, loc="center left", frameon=False, fontsize=_TEXT)
    else:
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=_TEXT)


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
    ax = _new_axes((3.6, 2.4)) if ax is None else ax
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
    ax.set(ylim=(0, 1.02), xticks=list(classes))
    ax.set_xticklabels(names if names is not None else [str(number) for number in classes])
    ax.set_xlabel("class", fontsize=_TEXT)
    ax.set_ylabel("probability", fontsize=_TEXT)
    _plain(ax)
    return ax


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
    ax = _new_axes((3.0, 3.0)) if ax is None else ax
    from matplotlib.patches import Ellipse  # after the line above, which says so when matplotlib is missing

    view = _plane(gaussian, _checked_index(index, len(gaussian)), classes)
    first, second = view.sample(samples, seed)
    colours = [BLUE if a > b else ORANGE for a, b in zip(first, second, strict=True)]
    ax.scatter(first, second, s=5, c=colours, alpha=0.45, linewidths=0)
    for sigma in (1, 2):
        ellipse = Ellipse(
            view.mean,
            2 * sigma * view.major,
            2 * sigma * view.minor,
            angle=math.degrees(view.angle),
            fill=False,
            edgecolor=INK,
            linewidth=1.2 if sigma == 1 else 0.8,
        )
        ax.add_patch(ellipse)
    ax.plot(*view.mean, marker="+", color=INK, markersize=6)
    low, high = limits if limits is not None else _limits([view])
    ax.plot([low, high], [low, high], color=INK, linewidth=1.0, linestyle=_DASHED)
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    i, j = classes
    ax.text(
        0.84,
        0.87,
        f"$g_{{{i}}} = g_{{{j}}}$",
        transform=ax.transAxes,
        rotation=45,
        horizontalalignment="center",
        verticalalignment="bottom",
        rotation_mode="anchor",
        fontsize=_SMALL,
        color=INK,
    )
    ax.set_xlabel(rf"$g_{{{i}}} - \bar g$", fontsize=_TEXT, color=BLUE)
    ax.set_ylabel(rf"$g_{{{j}}} - \bar g$", fontsize=_TEXT, color="#A87300")
    _plain(ax)
    return ax


def figure_one(
    images: Float[Tensor, "R H W"],
    gaussian: LogitGaussian,
    prediction: Prediction,
    *,
    classes: Sequence[tuple[int, int]] | None = None,
    titles: Sequence[str] | None = None,
    samples: int = 300,
    seed: int = 0,
) -> Figure:
    """The paper's first figure: one row an input, with the image, P^g for two classes, and the PMF.

    `classes` says which two logits each row shows; without it the two most probable. All ellipses have the
    same scale, so that their sizes can be compared.
    """
    rows = len(images)
    if not rows == len(gaussian) == len(prediction.pmf):
        raise ArgumentError(
            "figure_one draws one row an input and needs as many images as logits and predictions; "
            f"got {rows}, {len(gaussian)} and {len(prediction.pmf)}."
        )
    if classes is None:
        classes = [(int(i), int(j)) for i, j in prediction.pmf.topk(2).indices.tolist()]
    figure = _new_figure((7.4, 2.25 * rows))
    grid = figure.subplots(rows, 3, squeeze=False, width_ratios=(0.8, 1.0, 1.7))
    limits = _limits([_plane(gaussian, row, pair) for row, pair in enumerate(classes)])
    for row, pair in enumerate(classes):
        picture, plane, bars = grid[row]
        picture.imshow(images[row].detach().cpu().numpy(), cmap="gray_r", interpolation="nearest")
        picture.set(xticks=[], yticks=[])
        for spine in picture.spines.values():
            spine.set_edgecolor(GREY)
        if titles is not None:
            picture.set_title(titles[row], fontsize=_TEXT, color=INK)
        logit_ellipse(gaussian, row, classes=pair, samples=samples, seed=seed, limits=limits, ax=plane)
        pmf(prediction, row, highlight=pair, ax=bars)
        if row < rows - 1:
            bars.set_xlabel("")
    return figure


class _Plane(NamedTuple):
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


def _plane(gaussian: LogitGaussian, index: int, classes: tuple[int, int]) -> _Plane:
    centered = gaussian[index : index + 1].centered()
    i, j = classes
    mean, covariance = centered.mean[0].double(), centered.covariance[0].double()
    a, b, c = float(covariance[i, i]), float(covariance[i, j]), float(covariance[j, j])
    middle, radius = (a + c) / 2, math.hypot((a - c) / 2, b)
    return _Plane(
        mean=(float(mean[i]), float(mean[j])),
        major=math.sqrt(max(middle + radius, 0.0)),
        minor=math.sqrt(max(middle - radius, 0.0)),
        angle=math.atan2(2 * b, a - c) / 2,
    )


def _limits(planes: Sequence[_Plane]) -> tuple[float, float]:
    """One square that holds the 3 σ circles of all."""
    low = min(coordinate - 3 * plane.major for plane in planes for coordinate in plane.mean)
    high = max(coordinate + 3 * plane.major for plane in planes for coordinate in plane.mean)
    return (low, high) if high > low else (low - 1.0, high + 1.0)


def _checked_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise ArgumentError(f"index says which input to draw and lies in 0 … {length - 1}; got {index}.")
    return index % length


def _plain(ax: Axes) -> None:
    ax.tick_params(labelsize=_SMALL, length=3)
    ax.spines[["top", "right"]].set_visible(False)


def _new_axes(size: tuple[float, float]) -> Axes:
    return _new_figure(size).subplots()


def _new_figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise MissingExtraError(
            "Figures need matplotlib, which is not installed: pip install 'errbar[plots]'."
        ) from missing
    return Figure(figsize=size, layout="constrained")
