"""Axes drawn as SVG: scales, ticks, lines and marks in a frame of one size.

Charts are drawn by hand rather than by matplotlib, so that their text stays text, their colours follow the page into
dark mode and print, and a page takes tens of kilobytes. Colours are names of CSS classes (`blue`, `vermilion`, …),
which the page ties to those of `plots.curves`. Coordinates are CSS pixels, y downwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from errbar.report.markup import Child, Markup, element, number
from errbar.report.numbers import significant

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps values between `low` and `high` to pixels between `start` and `stop`; `kind` is linear, log or root."""

    low: float
    high: float
    start: float
    stop: float
    kind: str = "linear"

    def __call__(self, value: float) -> float:
        low, high, at = (self._inner(number) for number in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.05), 1.05) * (self.stop - self.start)

    def _inner(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, 1e-300))
        return math.sqrt(max(value, 0.0)) if self.kind == "root" else value

    def ticks(self, target: int = 5) -> list[float]:
        """Round values inside: 1, 2 or 5 times a power of ten; on a logarithmic scale powers of ten if they suffice.

        >>> Scale(0, 1, 0, 100).ticks(), Scale(0.01, 10, 0, 100, "log").ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.01, 0.1, 1.0, 10.0])
        """
        if self.kind == "log":
            return self._log_ticks(target)
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        rough = span / target
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        ticks = [round(place * step, 12) for place in range(first, last + 1)]
        # The root squeezes small values together: keep only zero and those that have room.
        return ticks if self.kind == "linear" else [tick for tick in ticks if tick == 0 or tick >= 0.15 * self.high]

    def _log_ticks(self, target: int) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        factors = (
            (1,) if last - first >= 2 else (1, 2, 5) if last - first >= 1 or self.high / self.low > 3 else range(1, 10)
        )
        places = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in factors]
        inside = [place for place in places if self.low * 0.999 <= place <= self.high * 1.001]
        step = max(1, -(-len(inside) // (target + 2)))
        return inside[::step]


@dataclass(frozen=True)
class Frame:
    """A rectangle of a chart with an x and a y scale."""

    x: Scale
    y: Scale

    def place(self, points: Iterable[Point]) -> list[Point]:
        return [(self.x(a), self.y(b)) for a, b in points]

    def line(self, points: Sequence[Point], colour: str, *, dash: str = "", width: float = 1.6) -> Markup:
        """A curve through the points."""
        return polyline(self.place(points), colour, dash=dash, width=width)

    def bar(self, left: float, right: float, low: float, high: float, colour: str, **attributes: str) -> Markup:
        """A bar between two values of x and two of y, with half a pixel of space on each side."""
        x, top, bottom = self.x(left) + 0.5, self.y(high), self.y(low)
        width, height = max(0.0, self.x(right) - 0.5 - x), max(0.0, bottom - top)
        return element("rect", x=x, y=top, width=width, height=height, class_=f"fill {colour}", **attributes)

    def axes(
        self,
        x_label: Child,
        y_label: Child,
        *,
        x_ticks: Sequence[float] | None = None,
        y_ticks: Sequence[float] | None = None,
        percent: bool = False,
    ) -> Markup:
        """The left and the lower axis with ticks and labels; no lines above or on the right."""
        x, y = self.x, self.y
        parts = [
            segment((x.start, y.start), (x.stop, y.start), "axis"),
            segment((x.start, y.start), (x.start, y.stop), "axis"),
        ]
        for tick in x.ticks() if x_ticks is None else x_ticks:
            at = x(tick)
            parts.append(segment((at, y.start), (at, y.start + 3), "axis"))
            parts.append(label(at, y.start + 14, _tick_text(tick), anchor="middle"))
        for tick in y.ticks() if y_ticks is None else y_ticks:
            at = y(tick)
            parts.append(segment((x.start - 3, at), (x.start, at), "axis"))
            parts.append(
                label(x.start - 6, at + 3.5, _tick_text(100 * tick) if percent else _tick_text(tick), anchor="end")
            )
        parts.append(label((x.start + x.stop) / 2, y.start + 28, x_label, anchor="middle"))
        middle = (y.start + y.stop) / 2
        rotation = f"rotate(-90 {number(x.start - 41)} {number(middle)})"
        parts.append(label(x.start - 41, middle, y_label, anchor="middle", transform=rotation))
        return Markup("".join(parts))


def frame_for(
    x: tuple[float, float],
    y: tuple[float, float],
    size: tuple[float, float],
    *,
    top: float = 8.0,
    kinds: tuple[str, str] = ("linear", "linear"),
) -> Frame:
    """A frame that fills a chart of `size`, except for room for the axes on the left and below, and for `top` above."""
    width, height = size
    return Frame(Scale(*x, 52.0, width - 10.0, kinds[0]), Scale(*y, height - 34.0, top, kinds[1]))


def chart(size: tuple[float, float], title: str, *parts: Child) -> Markup:
    """An SVG picture of `size`, whose title is for screen readers."""
    width, height = size
    return element(
        "svg",
        parts,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=title,
        style=f"max-width:{number(width)}px",
    )


def polyline(points: Sequence[Point], colour: str, *, dash: str = "", width: float = 1.6) -> Markup:
    path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    return element("path", d=path, class_=f"line {colour}", stroke_width=width, stroke_dasharray=dash or None)


def segment(start: Point, end: Point, kind: str) -> Markup:
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=kind)


def label(
    x: float, y: float, words: Child, *, anchor: str = "start", class_: str | None = None, transform: str | None = None
) -> Markup:
    """Text at a point; `anchor` says which end of it lies there."""
    where = None if anchor == "start" else anchor
    return element("text", words, x=x, y=y, text_anchor=where, class_=class_, transform=transform)


def italic(letter: str, index: str = "") -> Markup:
    """A symbol with its index, if any."""
    below = element("tspan", index, dy=3, font_size=8) if index else ""
    return Markup(element("tspan", letter, font_style="italic") + below)


def _tick_text(value: float) -> str:
    return significant(value, 3)
