"""Curves of several methods in one picture, and what all pictures share: colours, line styles, plain axes.

Users find the curves in `errbar.plots`. A method has one `Style` wherever it appears: a colour and, for the
colour-blind and for grey print, a dash and a marker as well.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.atomic import write_file
from errbar.errors import ArgumentError, MissingExtraError, how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
GREEN, PURPLE, OLIVE, STONE = "#009E73", "#CC79A7", "#999933", "#808080"
GREY, INK, DARK_ORANGE = "#B8BCC2", "#262626", "#A87300"
SMALL, TEXT = 8, 9
DASHED = (0, (4, 3))
_ROUNDS = 6

Dash = str | tuple[float, tuple[float, ...]]
Curve = tuple[Sequence[float], Sequence[float]]
Value = TypeVar("Value")

DASHES: tuple[Dash, ...] = (
    "-",
    (0, (4, 1.8)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (1.2, 1.4)),
    (0, (7, 1.4, 1.2, 1.4, 1.2, 1.4)),
)
_COLOURS = (INK, ORANGE, GREEN, PURPLE, SKY, BLUE, OLIVE, VERMILION, STONE)
_MARKERS = ("o", "s", "^", "v", "D", "X", "P")


class Style(NamedTuple):
    """How one method looks in every figure."""

    color: str
    dash: Dash
    marker: str

    def line(self) -> dict[str, Any]:
        """As keyword arguments of `Axes.plot` and `Line2D`."""
        marker = {"marker": self.marker, "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
        return {"color": self.color, "linestyle": self.dash, "linewidth": 1.2, **marker}


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name by its position. 9 colours, 5 dashes and 7 markers: the first 315 are all different."""
    return {
        name: Style(_COLOURS[place % len(_COLOURS)], DASHES[place % len(DASHES)], _MARKERS[place % len(_MARKERS)])
        for place, name in enumerate(dict.fromkeys(names))
    }


def shift(
    severity: Sequence[float],
    values: Mapping[str, Float[Tensor, "R S"]],
    *,
    kind: str = "severity",
    measure: str = "",
    looks: Mapping[str, Style] | None = None,
    key: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A measure against the severity of a shift, name → values of R runs at S severities.

    Lines are means over the runs, bands one standard deviation on each side. `looks` gives the names a style (without
    it they get one by position, see `styles`), and `key=False` leaves the names to a key elsewhere.
    """
    ax = _new_curves(values, 2.6) if ax is None else ax
    looks = _checked_looks(values, looks)
    for name, runs in values.items():
        if runs.ndim != 2 or runs.shape[1] != len(severity):
            raise ArgumentError(
                f"The values of {name!r} have shape {tuple(runs.shape)}; expected (runs, {len(severity)}), one column "
                "per severity."
            )
        mean = runs.mean(0)
        line = ax.plot(severity, mean.tolist(), label=_in_key(name), **looks[name].line())[0]
        # Markers in a row of a hundred would be a thick line.
        line.set_markevery(max(1, len(severity) // 8))
        if len(runs) > 1:
            spread = runs.std(0)
            low, high = (mean - spread).tolist(), (mean + spread).tolist()
            ax.fill_between(severity, low, high, color=looks[name].color, alpha=0.15, linewidth=0)
    if severity[0] > severity[-1]:
        ax.invert_xaxis()  # contrast, say: the severity is in the order given
    ax.set_xlabel(kind, fontsize=TEXT)
    ax.set_ylabel(measure, fontsize=TEXT)
    return _finished(ax, key)


def roc(
    curves: Mapping[str, Curve],
    *,
    areas: Mapping[str, float] | None = None,
    looks: Mapping[str, Style] | None = None,
    key: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """ROC curves, name → (false-positive rates, true-positive rates), with the area under each in the key.

    `areas` has the areas where the curves were thinned out; otherwise the trapezoids under them are summed up.
    """
    ax = _new_curves([_with_area(name, 0.0) for name in curves], 3.6) if ax is None else ax
    areas = {name: _area(*curve) for name, curve in _checked_curves(curves).items()} if areas is None else areas
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=0.8, linestyle=DASHED)
    _draw(ax, curves, looks, {name: _with_area(name, areas[name]) for name in curves})
    ax.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal", xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    ax.set_xlabel("false-positive rate", fontsize=TEXT)
    ax.set_ylabel("true-positive rate", fontsize=TEXT)
    return _finished(ax, key)


def risk_coverage(
    curves: Mapping[str, Curve],
    *,
    looks: Mapping[str, Style] | None = None,
    key: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """Risk–coverage curves, name → (coverage, risk).

    The risk is the share of errors among the most confident inputs, the coverage the share of all inputs that those
    are: what is left of the errors where a classifier may decline to answer. `metrics.aurc` is the area below.
    """
    ax = _new_curves(curves, 2.6) if ax is None else ax
    _draw(ax, _checked_curves(curves), looks, {name: name for name in curves})
    ax.set(xlim=(0, 1.01))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("coverage", fontsize=TEXT)
    ax.set_ylabel("risk", fontsize=TEXT)
    return _finished(ax, key)


def _draw(ax: Axes, curves: Mapping[str, Curve], looks: Mapping[str, Style] | None, labels: Mapping[str, str]) -> None:
    looks = _checked_looks(curves, looks)
    for name, (x, y) in curves.items():
        line = ax.plot(x, y, label=_in_key(labels[name]), **looks[name].line())[0]
        # A marker every 15 % of the diagonal, wherever the points of the curve are.
        line.set_markevery((0.1, 0.15))


def _with_area(name: str, area: float) -> str:
    return f"{name} (AUROC {area:.3f})"


def _in_key(name: str) -> str:
    """In lines that fit above axes in a figure of their own."""
    return wrapped(name, 3.3 - 1.3, SMALL)


def _new_curves(names: Iterable[str], height: float) -> Axes:
    """Axes of 3.3 inches; the figure is higher where the key has more than four lines."""
    lines = sum(1 + _in_key(name).count("\n") for name in names)
    return new_axes((3.3, height + 0.17 * max(0, lines - 4)))


def _area(x: Sequence[float], y: Sequence[float]) -> float:
    return float(torch.trapezoid(torch.tensor(y, dtype=torch.float64), torch.tensor(x, dtype=torch.float64)))


def _checked_curves(curves: Mapping[str, Curve]) -> Mapping[str, Curve]:
    for name, (x, y) in curves.items():
        if len(x) != len(y):
            raise ArgumentError(f"The curve {name!r} has {len(x)} x and {len(y)} y; expected as many of each.")
    return curves


def _checked_looks(values: Mapping[str, Value], looks: Mapping[str, Style] | None) -> Mapping[str, Style]:
    if not values:
        raise ArgumentError("There is nothing to draw; expected a mapping from names to values.")
    looks = styles(values) if looks is None else looks
    missing = [name for name in values if name not in looks]
    if missing:
        raise ArgumentError(f"looks has no style for {missing[0]!r}; expected one for each of {', '.join(values)}.")
    return looks


def _finished(ax: Axes, key: bool) -> Axes:
    plain(ax)
    if key:
        # Above the axes, where no data are.
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.01), frameon=False, fontsize=SMALL, handlelength=3.2)
    return ax


def key_below(figure: Figure, names: Iterable[str], looks: Mapping[str, Style]) -> None:
    """One key below all panels, in as many columns as fit."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **looks[name].line()) for name in dict.fromkeys(names)]
    columns = _key_columns([str(handle.get_label()) for handle in handles], figure.get_figwidth())
    shape: dict[str, Any] = {"ncols": columns, "handlelength": 3.2, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=SMALL, **shape)


def _key_columns(names: Sequence[str], width: float) -> int:
    """As many columns, of equally many rows, as `width` inches hold: a letter takes 0.06 inches, a line 0.5."""
    sizes = [0.06 * len(name.replace("$", "")) + 0.6 for name in names]
    for rows in range(1, len(sizes)):
        if sum(max(sizes[start : start + rows]) for start in range(0, len(sizes), rows)) <= width:
            return -(-len(sizes) // rows)
    return 1


def key_height(names: Iterable[str], width: float) -> float:
    """Inches that a key takes."""
    names = list(names)
    return 0.1 + 0.17 * -(-len(names) // _key_columns(names, width))


def plain(ax: Axes) -> None:
    """Small ticks, and no frame at the top and on the right."""
    ax.tick_params(labelsize=SMALL, length=3)
    ax.spines[["top", "right"]].set_visible(False)


def wrapped(text: str, inches: float, size: float) -> str:
    """The text in lines of at most `inches`, at a font size in points; a word that is longer is a line of its own."""
    from matplotlib.textpath import TextPath

    lines: list[str] = []
    for word in text.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and TextPath((0, 0), longer, size=size).get_extents().x1 / 72 <= inches:
            lines[-1] = longer
        else:
            lines.append(word)
    return "\n".join(lines)


def new_axes(size: tuple[float, float]) -> Axes:
    """Axes in a figure of their own."""
    return new_figure(size).subplots()


def new_figure(size: tuple[float, float]) -> Figure:
    """A figure of `size` inches that pyplot does not know."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from numpy import allclose
    except ImportError as missing:
        raise MissingExtraError(
            f"Figures need matplotlib, which is not installed: {how_to_install('plots')}."
        ) from missing

    class Settled(ConstrainedLayoutEngine):
        """Measures again where the panels have come to lie, until they stay there.

        Constrained layout makes room for what it measures at the former places. Panels of a fixed shape are smaller
        there, so in one round it leaves too little room for titles and labels.
        """

        def execute(self, fig: Any) -> None:
            for _ in range(_ROUNDS):
                before = [ax.get_position(original=True).extents for ax in fig.axes]
                super().execute(fig)
                after = [ax.get_position(original=True).extents for ax in fig.axes]
                if all(allclose(a, b, rtol=0, atol=1e-4) for a, b in zip(before, after, strict=True)):
                    return

    return Figure(figsize=size, layout=Settled(h_pad=0.06, w_pad=0.05))


def write_figure(figure: Figure, path: Path, **options: Any) -> None:
    """Write a figure atomically, in the format of the file's name; `options` are those of `savefig`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], **options)
    write_file(path, buffer.getvalue())
