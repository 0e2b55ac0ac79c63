"""The larger parts of the page: the table of scores, the inputs to look at, and the provenance."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from errbar._files.choice_table import ChoiceTable
from errbar.report import charts
from errbar.report.markup import Child, Markup, element
from errbar.report.numbers import count, fixed, percent, span
from errbar.report.values import Estimate, Report, ShownInput
from errbar.report.wording import prose, table


def scores_table(report: Report) -> list[Child]:
    """Each variant with its scores, and below each score its interval; the best of each column is bold."""
    variants = report.variants
    columns: list[tuple[str, list[Child]]] = [
        ("accuracy (%)", _cells([one.accuracy for one in variants], 1, 100.0, largest=True)),
        ("NLL", _cells([one.nll for one in variants], 4, 1.0)),
        ("Brier", _cells([one.brier for one in variants], 4, 1.0)),
        ("ECE (%)", _cells([one.ece for one in variants], 2, 100.0)),
        ("claimed − right", _cells([one.gap for one in variants], 1, 100.0, nearest=True)),
        ("AURC", [fixed(one.aurc, 4) for one in variants]),
    ]
    rows = [(one.name, *(cells[place] for _, cells in columns)) for place, one in enumerate(variants)]
    what = report.decisions or f"{count(report.inputs)} inputs of {count(report.classes)} classes"
    caption = (
        f"{what}; 95\u202f% intervals below{', by resampling inputs' if report.decisions else ''}. Claimed minus "
        "right is the mean confidence minus the accuracy, in percentage points: positive is over-confident."
    )
    return [table("scores-caption", caption, ("probabilities", *(title for title, _ in columns)), rows)]


def choice_table(choice: ChoiceTable) -> list[Child]:
    """What `autofit` tried, as it printed it; the row that it chose is bold."""
    rows = [[element("b", cell) if cell and row[-1] else cell for cell in row] for row in choice.rows]
    caption = (
        "Out of fold on the held-out data of the choice, which are not the data of this report: everything was fitted "
        "on the other folds. The differences in NLL to temperature scaling (T alone) are paired, with 95\u202f% "
        "intervals."
    )
    notes = [element("li", f"Not tried: {note}") for note in choice.not_tried]
    return [
        element("p", prose(choice.reason)),
        table("choice-caption", caption, choice.headings, rows, words=(1, 3, len(choice.headings) - 1)),
        element("ul", notes) if notes else None,
    ]


def _cells(
    estimates: Sequence[Estimate], digits: int, scale: float, *, largest: bool = False, nearest: bool = False
) -> list[Child]:
    """Numbers with their intervals; the best is the smallest, the largest, or the one nearest to zero."""
    ranks = [-one.value if largest else abs(one.value) if nearest else one.value for one in estimates]
    # Equal texts are equally good.
    texts = [fixed(scale * one.value, digits) for one in estimates]
    best = texts[ranks.index(min(ranks))]
    cells: list[Child] = []
    for one, text in zip(estimates, texts, strict=True):
        number = element("span", text, class_="best" if text == best else None)
        cells.append(Markup(number + element("small", span(one, digits, scale))))
    return cells


def labels_section(report: Report) -> list[Child]:
    """Several labels one by one."""
    headings = ("label", "given", "true", "probability", "std", "NLL", "ECE", "AUROC", "average precision")
    body = [
        (
            row.name,
            count(row.given),
            *(fixed(100 * value, 1) for value in (row.true, row.probability, row.std)),
            fixed(row.nll, 4),
            fixed(100 * row.ece, 1),
            fixed(row.auroc, 3),
            fixed(row.precision, 3),
        )
        for row in report.label_rows
    ]
    caption = (
        f"{report.variants[-1].name.capitalize()}. True: the share of the inputs with this label for which it is true; "
        "probability: the mean probability that it is, and its mean standard deviation. The ECE has bins of that "
        "probability. True, probability, std and ECE in per cent."
    )
    return [table("labels-caption", caption, headings, body)]


def examples_section(report: Report) -> list[Child]:
    parts: list[Child] = [
        element(
            "p",
            prose(
                "Bars are probabilities with their 95\u202f% intervals: blue for the prediction, orange for the label "
                "if it is another class. Ellipses show the logits of two classes, minus the mean over all classes, "
                "at one and two standard deviations. Dots are draws, in the colour of the class that wins; on the "
                "dashed line both are equal."
            ),
        ),
        element("h3", "Most uncertain: the parameters say least about the class (mutual information)"),
        element("ol", (_card(example) for example in report.uncertain), class_="cards"),
    ]
    if report.wrong:
        parts += [
            element("h3", "Most confidently wrong"),
            element("ol", (_card(example) for example in report.wrong), class_="cards"),
        ]
    else:
        parts.append(element("p", "No prediction is wrong.", class_="missing"))
    pictures = [example.picture for example in (*report.uncertain, *report.wrong)]
    if any(picture is not None and picture.stretched for picture in pictures):
        parts.append(
            element("p", "The inputs are not within 0 … 1; each picture is stretched to that range.", class_="missing")
        )
    return parts


def _card(example: ShownInput) -> Markup:
    """The prediction for an input, its picture, its logits and its PMF, side by side."""
    title: list[Child] = [element("strong", example.predicted)]
    if example.label != example.predicted:
        title += [", labelled ", element("strong", example.label)]
    facts = (
        f"input {example.name}",
        f"confidence {percent(example.confidence)} ± {fixed(100 * example.std, 1)}",
        f"entropy {fixed(example.entropy, 2)} nats, {fixed(example.mutual_information, 2)} of it the model’s",
    )
    words = element("div", element("p", title), [element("p", fact, class_="fact") for fact in facts], class_="words")
    picture: Child = None
    if example.picture is not None:
        data = base64.b64encode(example.picture.png).decode("ascii")
        description = f"Input {example.name}, labelled {example.label}"
        picture = element("img", src=f"data:image/png;base64,{data}", alt=description, class_="picture")
    elif example.numbers:
        picture = element("p", example.numbers, class_="numbers")
    plane = element("div", charts.logit_ellipse(example.ellipse), class_="plane")
    bars = element("div", charts.pmf_bars(example.bars), class_="bars")
    return element("li", words, picture, plane, bars, class_="card" if example.picture is not None else "card plain")


def provenance_section(report: Report) -> list[Child]:
    groups: list[Child] = []
    for facts in report.provenance:
        heading = element("tr", element("th", facts.heading, scope="rowgroup", colspan=2))
        rows = [
            element("tr", element("th", name, scope="row"), element("td", element("code", value)))
            for name, value in facts.rows
        ]
        groups.append(element("tbody", heading, rows))
    return [element("table", groups, class_="provenance", aria_labelledby="provenance-title")]
