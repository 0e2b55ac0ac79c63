"""Predictions as a person reads them: five lines of text, bars in a notebook, a table of pandas.

A prediction is `Any` here, because `prediction.py` imports this module.
"""

from __future__ import annotations

import html
from typing import Any

from errbar.errors import MissingExtraError, how_to_install

# Inputs in the text and in a notebook, and the classes of each there: the most probable ones.
_LINES, _ROWS, _CLASSES = 3, 8, 4
_BAR, _MARK, _TRACK = "#0072B2", "#262626", "#E3E6EA"


def text_of(prediction: Any) -> str:
    """How much there is, and the most likely class of the first inputs with its standard deviation and interval."""
    opening = _opening(prediction)
    head = prediction[:_LINES]
    if not len(head):
        return opening
    lower, upper = head.interval(0.95)
    cells = [("input", "class", "probability", "95 %")]
    for row, label in enumerate(head.label.tolist()):
        mean, std = float(head.pmf[row, label]), float(head.std[row, label])
        ends = f"{float(lower[row, label]):.3f}–{float(upper[row, label]):.3f}"
        cells.append((str(row), str(label), f"{mean:.3f} ± {std:.3f}", ends))
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([opening, *lines])


def html_of(prediction: Any) -> str:
    """The most probable classes of the first inputs, each with a bar, and a line for its interval."""
    head = prediction[:_ROWS]
    lines = []
    if len(head):
        lower, upper = head.interval(0.95)
        best = head.pmf.topk(min(_CLASSES, head.pmf.shape[1])).indices
        for row, classes in enumerate(best.tolist()):
            for place, number in enumerate(classes):
                mean, std = float(head.pmf[row, number]), float(head.std[row, number])
                low, high = float(lower[row, number]), float(upper[row, number])
                cells = (
                    str(row) if place == 0 else "",
                    str(number),
                    _bar(mean, low, high),
                    f"{mean:.3f} ± {std:.3f}",
                    f"{low:.3f}–{high:.3f}",
                )
                lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    headings = "".join(f"<th>{name}</th>" for name in ("input", "class", "", "probability", "95 %"))
    left = len(prediction) - len(head)
    more = f"<p>… and {left:,} more inputs.</p>" if left else ""
    table = f"<table><tr>{headings}</tr>{''.join(lines)}</table>" if lines else ""
    return f"<p>{html.escape(_opening(prediction))}</p>{table}{more}"


def frame_of(prediction: Any, level: float) -> Any:
    """The columns that `Prediction.to_pandas` describes."""
    try:
        import pandas
    except ImportError as missing:
        raise MissingExtraError(
            f"to_pandas needs pandas, which is not installed: {how_to_install('pandas')}."
        ) from missing
    lower, upper = prediction.interval(level)
    of_input = {name: getattr(prediction, name) for name in ("label", "confidence", "entropy", "mutual_information")}
    columns: dict[str, Any] = {name: values for name, values in of_input.items() if values.ndim == 1}
    # Of several labels, each has all of them.
    of_class = {name: values for name, values in of_input.items() if values.ndim == 2}
    of_class |= {"pmf": prediction.pmf, "std": prediction.std, "lower": lower, "upper": upper}
    columns |= {
        f"{name}_{number}": values[:, number] for name, values in of_class.items() for number in range(values.shape[1])
    }
    return pandas.DataFrame({name: values.detach().cpu().numpy() for name, values in columns.items()})


def text_of_labels(prediction: Any) -> str:
    """How much there is, and the most probable labels of the first inputs with their standard deviations."""
    head = prediction[:_LINES]
    lines = [_opening(prediction, "labels")]
    if len(head):
        best = head.pmf.topk(min(_CLASSES, head.pmf.shape[1])).indices.tolist()
        for row, labels in enumerate(best):
            values = (
                f"{label}: {float(head.pmf[row, label]):.3f} ± {float(head.std[row, label]):.3f}" for label in labels
            )
            lines.append(f"input {row}  " + "  ".join(values))
    return "\n".join(lines)


def text_of_positions(prediction: Any) -> str:
    """How much there is."""
    shape = " × ".join(f"{size:,}" for size in prediction.leading[1:])
    return (
        _opening(prediction)
        .replace("inputs,", f"inputs of {shape} positions,", 1)
        .replace("input,", f"input of {shape} positions,", 1)
    )


def plain_html(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"


def _opening(prediction: Any, what: str = "classes") -> str:
    inputs, sampler = len(prediction), prediction.sampler
    noun = "input" if inputs == 1 else "inputs"
    return f"Prediction: {inputs:,} {noun}, {sampler.classes:,} {what}, {sampler.samples:,} samples"


def _bar(mean: float, low: float, high: float) -> str:
    """An SVG of 120 × 12 pixels; NaN has no bar."""
    if not (0 <= mean <= 1 and 0 <= low <= high <= 1):
        return ""
    return (
        '<svg width="120" height="12" role="img">'
        f'<rect width="120" height="12" fill="{_TRACK}"/>'
        f'<rect width="{120 * mean:.1f}" height="12" fill="{_BAR}"/>'
        f'<rect x="{120 * low:.1f}" y="5" width="{max(1.0, 120 * (high - low)):.1f}" height="2" fill="{_MARK}"/></svg>'
    )
