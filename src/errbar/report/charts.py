"""The charts of a report, from values to SVG. Colours mean what they mean in `errbar.plots`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from errbar.plots.curves import DASHES
from errbar.report.axes import Frame, Scale, chart, frame_for, italic, label, polyline, segment
from errbar.report.markup import Child, Markup, element
from errbar.report.numbers import count, fixed, percent, significant
from errbar.report.values import Bar, Curve, Ellipse, Histogram, Linearisation, Outliers, ScaleCurves, Variant
from errbar.report.wording import prose

# Narrow enough for a phone; two fit side by side on a page.
_SIZE = (320.0, 230.0)
_SQUARE = (236.0, 262.0)
_WIDE = (420.0, 250.0)
# By position, as `errbar.plots.curves.styles` gives them to methods.
LINES = ("ink", "orange", "green", "purple")
DASH = tuple("" if isinstance(dash, str) else " ".join(f"{part:g}" for part in dash[1]) for dash in DASHES)
_LEAST_CERTAIN = 20


def reliability(variant: Variant) -> Markup:
    """The accuracy of each bin of confidence with its interval, the gap to the mean confidence, and counts above."""
    size = _SQUARE
    frame = frame_for((0, 1), (0, 1), size, top=40.0)
    parts: list[Child] = []
    largest = max((bin_.count for bin_ in variant.diagram), default=1) or 1
    for bin_ in variant.diagram:
        if not bin_.count:
            continue
        accuracy, confidence = bin_.accuracy.value, bin_.confidence
        low, high = sorted((accuracy, confidence))
        faint = {"opacity": f"{0.35 + 0.65 * min(1.0, bin_.count / _LEAST_CERTAIN):.2f}"}
        parts.append(frame.bar(bin_.low, bin_.high, 0, low, "blue", **faint))
        over = confidence > accuracy
        parts.append(frame.bar(bin_.low, bin_.high, low, high, "over" if over else "sky", **faint))
        middle = frame.x((bin_.low + bin_.high) / 2)
        ends = (middle, frame.y(bin_.accuracy.low)), (middle, frame.y(bin_.accuracy.high))
        parts.append(element("g", segment(*ends, "whisker"), **faint))
        above = Scale(0, largest, 36.0, 8.0, "root")(bin_.count)
        left, right = frame.x(bin_.low) + 0.5, frame.x(bin_.high) - 0.5
        box = {"x": left, "y": above, "width": right - left, "height": 36.0 - above}
        parts.append(element("rect", class_="fill grey", **box))
    parts.append(frame.line([(0, 0), (1, 1)], "ink", dash="4 3", width=1.0))
    parts.append(frame.axes("confidence", "accuracy", x_ticks=(0, 0.5, 1), y_ticks=(0, 0.5, 1)))
    description = (
        f"Reliability diagram, {variant.name}: accuracy against confidence in {len(variant.diagram)} bins; expected "
        f"calibration error {percent(variant.ece.value)}; mean confidence {percent(variant.confidence)}, accuracy "
        f"{percent(variant.accuracy.value)}."
    )
    return chart(size, description, parts)


def confidence_histogram(histogram: Histogram, name: str) -> Markup:
    """All predictions by confidence, with the wrong ones in front; counts on a square-root scale."""
    highest = max(histogram.count)
    bins = len(histogram.count)
    frame = frame_for((0, 1), (0, highest * 1.02), _SIZE, kinds=("linear", "root"))
    parts: list[Child] = []
    for place, (total, wrong) in enumerate(zip(histogram.count, histogram.wrong, strict=True)):
        edges = place / bins, (place + 1) / bins
        if total:
            parts.append(frame.bar(*edges, 0, total, "grey"))
        if wrong:
            parts.append(frame.bar(*edges, 0, wrong, "over"))
    parts.append(frame.axes("confidence", "predictions"))
    description = (
        f"Histogram of the confidence, {name}: {count(sum(histogram.count))} predictions, of which "
        f"{count(sum(histogram.wrong))} are wrong; {count(histogram.count[-1])} lie above {fixed(1 - 1 / bins, 2)}."
    )
    return chart(_SIZE, description, parts)


def risk_coverage(variants: Sequence[Variant]) -> Markup:
    """The share of errors among the most confident inputs, for each variant."""
    highest = max(max(variant.risk_coverage.y) for variant in variants)
    frame = frame_for((0, 1), (0, highest * 1.05 or 1.0), _WIDE)
    lines = [_line(frame, variant.risk_coverage, place) for place, variant in enumerate(variants)]
    areas = ", ".join(f"{variant.name} {fixed(variant.aurc, 4)}" for variant in variants)
    axes = frame.axes("coverage", "errors among these (%)", percent=True)
    return chart(_WIDE, f"Risk against coverage. Areas under the curves: {areas}.", lines, axes)


def _line(frame: Frame, curve: Curve, place: int) -> Markup:
    return frame.line(list(zip(curve.x, curve.y, strict=True)), LINES[place], dash=DASH[place])


def key(names: Sequence[str]) -> Markup:
    """What the lines mean, as a list below the chart."""
    entries = []
    for place, name in enumerate(names):
        swatch = element(
            "svg", polyline([(0, 5), (30, 5)], LINES[place], dash=DASH[place]), viewBox="0 0 30 10", aria_hidden="true"
        )
        entries.append(element("li", swatch, element("span", prose(name))))
    return element("ul", entries, class_="key")


def temperature_curve(curves: ScaleCurves) -> Markup:
    """NLL against T, with the covariance and without it."""
    pair = [curves.by_temperature, curves.without_covariance]
    symbol = italic("T")
    description = (
        f"NLL against the temperature T, with T_c = {significant(curves.covariance_scale)} and with T_c = 0; T is "
        f"{significant(curves.temperature)}."
    )
    return _scale_chart(pair, curves.temperature, symbol, description)


def scale_curve(curves: ScaleCurves) -> Markup:
    """NLL against T_c, with the current T and with the best T for each."""
    pair = [curves.by_scale, *([curves.ridge] if curves.ridge is not None else [])]
    at = curves.covariance_scale or None
    description = (
        f"NLL against the covariance scale T_c, with T = {significant(curves.temperature)} and with the best T for "
        f"each; T_c is {significant(curves.covariance_scale)}."
    )
    return _scale_chart(pair, at, italic("T", "c"), description)


def _scale_chart(curves: Sequence[Curve], current: float | None, symbol: Markup, description: str) -> Markup:
    values = [value for curve in curves for value in curve.y if math.isfinite(value)]
    if not values:
        values = [0.0, 1.0]
    low = min(values)
    # Values far above the smallest NLL do not matter, and would flatten those that do.
    high = min(max(values), low + max(0.25 * abs(low), 0.02))
    margin = 0.06 * (high - low) or 0.01
    ends = curves[0].x[0], curves[0].x[-1]
    frame = frame_for(ends, (low - margin, high + margin), _SIZE, kinds=("log", "linear"))
    parts: list[Child] = []
    if current is not None:
        parts.append(segment((frame.x(current), frame.y.start), (frame.x(current), frame.y.stop), "chosen"))
    for place, curve in enumerate(curves):
        points = _below(curve, high + margin)
        if len(points) > 1:
            parts.append(frame.line(points, LINES[place], dash=DASH[place]))
    parts.append(frame.axes(symbol, "NLL"))
    return chart(_SIZE, description, parts)


def _below(curve: Curve, limit: float) -> list[tuple[float, float]]:
    """The points of a curve up to a limit of y, and where it crosses the limit (linear in ln x, as drawn)."""
    points = list(zip(curve.x, curve.y, strict=True))
    visible = [points[0]] if points[0][1] <= limit else []
    for (x, y), (next_x, next_y) in pairwise(points):
        if (y <= limit) != (next_y <= limit) and math.isfinite(y) and math.isfinite(next_y):
            visible.append((x * (next_x / x) ** ((limit - y) / (next_y - y)), limit))
        if next_y <= limit:
            visible.append((next_x, next_y))
    return visible


def roc(outliers: Outliers) -> Markup:
    """ROC curves of the outlier scores."""
    frame = frame_for((0, 1), (0, 1), (320.0, 300.0))
    parts: list[Child] = [frame.line([(0, 0), (1, 1)], "grey", dash="4 3", width=1.0)]
    parts += [_line(frame, row.curve, place) for place, row in enumerate(outliers.rows)]
    parts.append(frame.axes("false-positive rate", "true-positive rate"))
    areas = "; ".join(f"{row.name}: {fixed(row.auroc.value, 3)}" for row in outliers.rows)
    return chart((320.0, 300.0), f"ROC curves for telling {outliers.name} apart. AUROC: {areas}.", parts)


def linearisation(check: Linearisation) -> Markup:
    """The standard deviation of the most likely class by drawn networks, against that of the delta method."""
    values = [max(value, 1e-6) for point in check.points for value in point]
    low, high = min(values) / 1.3, max(values) * 1.3
    low = max(low, high * 1e-4)
    size = (320.0, 300.0)
    frame = frame_for((low, high), (low, high), size, kinds=("log", "log"))
    parts: list[Child] = [frame.line([(low, low), (high, high)], "ink", dash="4 3", width=1.0)]
    for first, second in check.points:
        x, y = frame.x(max(first, low)), frame.y(max(second, low))
        parts.append(element("circle", cx=x, cy=y, r=2.4, class_="dot blue"))
    parts.append(frame.axes("std by the delta method", "std by drawn networks"))
    description = (
        f"Standard deviations of the most likely class for {check.inputs} inputs: by {check.draws} drawn networks "
        f"against the delta method; median ratio {fixed(check.ratio.value, 2)}."
    )
    return chart(size, description, parts)


def pmf_bars(bars: Sequence[Bar]) -> Markup:
    """Probabilities as horizontal bars with their 95 % intervals; blue the prediction, orange the label."""
    width, row, left = 236.0, 19.0, 78.0
    size = (width, row * len(bars) + 20.0)
    across = Scale(0, 1, left, width - 8.0)
    parts: list[Child] = []
    colours = {"predicted": "blue", "label": "orange", "other": "grey"}
    for place, bar in enumerate(bars):
        top = place * row + 3
        middle = top + row / 2 - 2
        words = bar.name if len(bar.name) <= 13 else bar.name[:12] + "…"
        weight = "strong" if bar.role != "other" else None
        parts.append(label(left - 5, middle + 3.5, words, anchor="end", class_=weight))
        box = {"x": left, "y": top, "height": row - 5, "width": across(bar.probability) - left}
        parts.append(element("rect", class_=f"fill {colours[bar.role]}", **box))
        parts.append(segment((across(bar.low), middle), (across(bar.high), middle), "whisker"))
        ends = (across(bar.low), across(bar.high))
        parts += [segment((end, middle - 3), (end, middle + 3), "whisker") for end in ends]
    bottom = row * len(bars) + 3
    parts.append(segment((left, 0), (left, bottom), "axis"))
    parts.append(segment((left, bottom), (across(1), bottom), "axis"))
    for tick in (0, 0.5, 1):
        parts.append(segment((across(tick), bottom), (across(tick), bottom + 3), "axis"))
        parts.append(label(across(tick), bottom + 14, significant(tick), anchor="middle"))
    intervals = "; ".join(
        f"{bar.name} {percent(bar.probability)} ({percent(bar.low)} to {percent(bar.high)})" for bar in bars
    )
    return chart(size, f"Probabilities with 95 % intervals: {intervals}.", parts)


def logit_ellipse(ellipse: Ellipse) -> Markup:
    """The Gaussian over two centred logits: ellipses of 1 and 2 σ, draws, and the line on which both are equal."""
    side = 150.0
    reach = 2.6 * ellipse.major
    middle = sum(ellipse.mean) / 2
    half = max(abs(place - middle) for place in ellipse.mean) + reach or 1.0
    ends = middle - half, middle + half
    frame = Frame(Scale(*ends, 20.0, side - 4.0), Scale(*ends, side - 20.0, 4.0))
    unit = (side - 24.0) / (2 * half)
    parts: list[Child] = []
    for side_of, colour in ((True, "blue"), (False, "orange")):
        draws = [point for point in ellipse.draws if (point[0] > point[1]) == side_of]
        inside = [point for point in draws if all(ends[0] <= place <= ends[1] for place in point)]
        # Lines of zero length with round ends: one path for all dots.
        path = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in frame.place(inside))
        if path:
            parts.append(element("path", d=path, class_=f"dots {colour}"))
    x, y = frame.x(ellipse.mean[0]), frame.y(ellipse.mean[1])
    tilt = f"rotate({-math.degrees(ellipse.angle):.1f} {x:.1f} {y:.1f})"
    for sigma, width in ((1, 1.3), (2, 0.8)):
        axes = {"rx": sigma * ellipse.major * unit, "ry": sigma * ellipse.minor * unit}
        parts.append(element("ellipse", cx=x, cy=y, class_="line ink", stroke_width=width, transform=tilt, **axes))
    parts.append(frame.line([(ends[0], ends[0]), (ends[1], ends[1])], "ink", dash="4 3", width=0.9))
    parts.append(segment((20.0, side - 20.0), (side - 4.0, side - 20.0), "axis"))
    parts.append(segment((20.0, side - 20.0), (20.0, 4.0), "axis"))
    first, second = (name if len(name) <= 18 else name[:17] + "…" for name in ellipse.names)
    parts.append(label((side + 16) / 2, side - 6, first, anchor="middle", class_="is-blue"))
    turn = f"rotate(-90 12 {(side - 16) / 2})"
    parts.append(label(12, (side - 16) / 2, second, anchor="middle", class_="is-orange", transform=turn))
    description = (
        f"Logits of {ellipse.names[0]} ({fixed(ellipse.mean[0], 1)}) and {ellipse.names[1]} "
        f"({fixed(ellipse.mean[1], 1)}), minus their mean: an ellipse with half axes {significant(ellipse.major, 2)} "
        f"and {significant(ellipse.minor, 2)}."
    )
    return chart((side, side), description, parts)
