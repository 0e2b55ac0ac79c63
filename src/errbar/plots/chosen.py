"""The picture of an `autofit`: each candidate's NLL against temperature scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from errbar.errors import ArgumentError
from errbar.plots.curves import BLUE, DASHED, GREY, INK, SMALL, TEXT, VERMILION, new_axes, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from errbar._choosing.choice import Choice, Row

_LINE, _LABELS = 0.21, 3.1
# The picture is as wide as the candidates need; what is far worse than all of them has an arrow.
_MARGIN = 0.15


def choice(choice: Choice, *, ax: Axes | None = None) -> Axes:
    """For each candidate of `autofit` the paired difference in NLL to temperature scaling, with its 95 % interval.

    Left of the line is better than temperature scaling. The chosen one is blue and bold, with a filled mark; those that
    are worse by more than 3e-4, and so could not be chosen, have a hollow vermilion one. The plain softmax is on top.
    """
    from errbar._choosing.choice import TOLERANCE, Choice

    if not isinstance(choice, Choice):
        raise ArgumentError(f"choice is a {type(choice).__name__}; expected what errbar.autofit returns.")
    rows = [choice.baselines[0], *choice.rows]
    ax = new_axes((_LABELS + 3.4, 0.75 + _LINE * len(rows))) if ax is None else ax
    low, high = _range(choice)
    ax.axvline(0, color=INK, linewidth=0.8, linestyle=DASHED, zorder=1)
    for place, row in enumerate(rows):
        is_chosen = row is choice.chosen
        colour = BLUE if is_chosen else GREY if not row.structure else VERMILION if row.difference > TOLERANCE else INK
        left, right = max(row.interval[0], low), min(row.interval[1], high)
        if left < right:
            ax.plot([left, right], [place, place], color=colour, linewidth=2.4 if is_chosen else 1.2, zorder=2)
        if low <= row.difference <= high:
            face = colour if is_chosen else "white"
            ax.plot([row.difference], [place], "o", color=colour, markerfacecolor=face, markersize=5, zorder=3)
        for end, marker, beyond in ((low, "<", row.interval[0] < low), (high, ">", row.interval[1] > high)):
            if beyond:
                ax.plot([end], [place], marker, color=colour, markersize=5, zorder=3, clip_on=False)
    ax.set_yticks(range(len(rows)), [_label(row) for row in rows])
    for row, text in zip(rows, ax.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if row is choice.chosen else "normal")
    ax.set(xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    ax.set_xlabel("NLL minus that of temperature scaling", fontsize=TEXT)
    plain(ax)
    ax.tick_params(axis="y", length=0, labelsize=SMALL)
    ax.spines["left"].set_visible(False)
    return ax


def _range(choice: Choice) -> tuple[float, float]:
    """All differences of candidates, and the interval of the chosen one; at least a little on both sides of 0."""
    chosen = () if choice.chosen is None else choice.chosen.interval
    best = choice.rows[0].interval
    values = sorted([0.0, *chosen, *best, *(row.difference for row in choice.rows)])
    width = max(values[-1] - values[0], 1e-5)
    return values[0] - _MARGIN * width, values[-1] + _MARGIN * width


def _label(row: Row) -> str:
    if not row.structure:
        return row.parameters
    structure = row.structure if len(row.structure) <= 12 else "mixed"
    link = row.link.replace("T_c", "$T_c$").replace("T,", "$T$,").replace(", c", ", $c$")
    prior = {"evidence": "prior by evidence", "nll": "prior by NLL"}.get(row.prior_by, "prior 1")
    return f"{row.parameters}, {structure}; {link}; {prior}"
