"""The page of a report: one HTML file without scripts, which loads nothing."""

from __future__ import annotations

import os
from importlib import resources

from errbar._base.atomic import require_writable_folder, write_file
from errbar.plots import curves
from errbar.report import charts
from errbar.report.markup import Child, Markup, element
from errbar.report.numbers import count, fixed, percent, significant
from errbar.report.sections import choice_table, examples_section, labels_section, provenance_section, scores_table
from errbar.report.values import Linearisation, Outliers, Report, ScaleCurves
from errbar.report.wording import prose, table

# The colours of all plots of the package, by the names in the style sheet.
_COLOURS = {
    "blue": curves.BLUE,
    "sky": curves.SKY,
    "orange": curves.ORANGE,
    "vermilion": curves.VERMILION,
    "green": curves.GREEN,
    "purple": curves.PURPLE,
    "grey": curves.GREY,
    "ink": curves.INK,
    "dark-orange": curves.DARK_ORANGE,
    "dark-blue": curves.BLUE,
}
# Nothing is loaded, and the policy makes sure of it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_CLASS_ROWS = 60


def write(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the page atomically."""
    require_writable_folder(path)
    # File names may hold bytes that are not text; these become question marks.
    data = page(report).encode("utf-8", errors="replace")
    write_file(path, data)


def page(report: Report) -> str:
    """The HTML of a report."""
    sections = [section for section in _sections(report) if section is not None]
    contents = [element("li", element("a", title, href=f"#{anchor}")) for anchor, title, _ in sections]
    body = (
        _patterns(),
        element(
            "header",
            element("h1", "How far can these probabilities be trusted?"),
            element("p", report.subject, class_="subject"),
        ),
        element(
            "main",
            _verdict(report),
            element("nav", element("ol", contents), aria_label="Contents"),
            (
                element(
                    "section",
                    element("h2", title, id=f"{anchor}-title"),
                    inside,
                    id=anchor,
                    aria_labelledby=f"{anchor}-title",
                )
                for anchor, title, inside in sections
            ),
        ),
        element("footer", element("p", prose(_foot(report)))),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"errbar report: {report.subject}"),
        element(
            "style", Markup(_colours() + resources.files("errbar.report").joinpath("style.css").read_text("utf-8"))
        ),
    )
    return "<!doctype html>\n" + element("html", head, element("body", body), lang="en") + "\n"


_FOOT = (
    "Intervals are 95\u202f% intervals: of accuracies by Wilson’s formula, of AUROCs by DeLong’s, of the ECE by "
    "inverting a test with binomial bins, of everything else by resampling the inputs 1000 times (basic bootstrap). "
    "They show how the numbers would vary with other inputs from the same source, not with another source. "
    "PMF: the probabilities of all classes. NLL: the mean of −ln of the predicted probability of the label. "
    "Brier: the mean squared distance between PMF and label. ECE: the mean gap between confidence and accuracy over "
    "bins of the confidence. AURC: the mean error rate over all coverages. Lower is better for the last four. "
    "The method: Malmström, Skog, Axehill and Gustafsson, arXiv 2303.07114."
)


def _foot(report: Report) -> str:
    if not report.decisions:
        return _FOOT
    return _FOOT_OF_DECISIONS + _FOOT[_FOOT.index("They show") :]


_FOOT_OF_DECISIONS = (
    "Accuracy, NLL, Brier and ECE are over decisions: every label that is given, or every position that has one. "
    "Brier is that of the PMF of a position, and of a label (y − f)². "
    "Intervals are 95\u202f% intervals: of AUROCs by DeLong’s formula, of everything else by resampling the inputs "
    "1000 times (basic bootstrap), each with all of its decisions, which depend on each other; the ECE has none for "
    "that reason. "
)


def _colours() -> str:
    return ":root{" + "".join(f"--{name}:{value};" for name, value in _COLOURS.items()) + "}\n"


def _patterns() -> Markup:
    """The hatching for what is over-confident or wrong, so that colour is not the only cue."""
    lines = element("path", d="M-1 6L6 -1M-1 11L11 -1M4 11L11 4")
    back = element("rect", width=10, height=10)
    pattern = element("pattern", back, lines, id="over", width=5, height=5, patternUnits="userSpaceOnUse")
    return element("svg", element("defs", pattern), class_="hidden", aria_hidden="true", width=0, height=0)


def _verdict(report: Report) -> Markup:
    sentences = [element("p", prose(sentence)) for sentence in report.verdict.sentences]
    heading = element("h2", prose(report.verdict.headline), id="verdict")
    return element("section", heading, sentences, class_="verdict", aria_labelledby="verdict")


def _sections(report: Report) -> list[tuple[str, str, Child] | None]:
    """Anchor, title and content of each part that the report has."""
    return [
        ("scores", "Scores", scores_table(report)),
        ("calibration", "Calibration", _calibration(report)),
        ("coverage", "What abstaining would gain", _coverage(report)),
        None if report.choice is None else ("choice", "What was tried", choice_table(report.choice)),
        ("scales", "Temperature and covariance scale", _scales(report.curves, report)),
        ("labels", "Label by label", labels_section(report))
        if report.label_rows
        else ("classes", "Class by class", _classes(report)),
        None if report.decisions else ("inputs", "Inputs to look at", examples_section(report)),
        None if report.outliers is None else ("outliers", "Inputs from elsewhere", _outliers(report.outliers)),
        ("linearisation", "Is the linearisation good enough?", _linearisation(report.linearisation, report)),
        ("provenance", "Provenance", provenance_section(report)),
    ]


def _panel(title: Child, drawing: Markup) -> Markup:
    return element("div", element("h3", title), drawing, class_="panel")


def _figure(name: str, caption: Child, *panels: Child, three: bool = False, key: Child = None) -> Markup:
    kind = "charts three" if three else "charts"
    figcaption = element("figcaption", element("b", prose(name)), " ", caption)
    return element("figure", element("div", panels, class_=kind), key, figcaption)


def _calibration(report: Report) -> list[Child]:
    diagrams = [
        _panel([variant.name, element("span", f"ECE {percent(variant.ece.value)}")], charts.reliability(variant))
        for variant in report.variants
    ]
    extremes = [report.variants[0], report.variants[-1]]
    histograms = [_panel(one.name, charts.confidence_histogram(one.histogram, one.name)) for one in extremes]
    swatches = (
        ("blue", "accuracy"),
        ("over", "over-confident by"),
        ("sky", "under-confident by"),
        ("grey", "predictions"),
    )
    return [
        _figure(
            "Reliability.",
            prose(
                "The accuracy of the predictions in each bin of confidence, with its 95\u202f% interval "
                "(thin line), and the gap between accuracy and confidence. On the dashed line both are equal. Bins "
                "with fewer than 20 predictions are faint; the grey bars above show the number of predictions on a "
                "square-root scale."
            ),
            diagrams,
            three=len(diagrams) > 2,
            key=_boxes(swatches),
        ),
        _figure(
            "Confidence.",
            "How confident the predictions are; counts on a square-root scale.",
            histograms,
            key=_boxes((("grey", "all predictions"), ("over", "wrong ones"))),
        ),
    ]


def _boxes(entries: tuple[tuple[str, str], ...]) -> Markup:
    items = []
    for colour, name in entries:
        box = element("rect", width=14, height=11, class_=f"fill {colour}")
        swatch = element("svg", box, viewBox="0 0 14 11", class_="box", aria_hidden="true")
        items.append(element("li", swatch, element("span", name)))
    return element("ul", items, class_="key")


def _coverage(report: Report) -> list[Child]:
    final = report.variants[-1]
    curve = final.risk_coverage
    at = min(range(len(curve.x)), key=lambda place: abs(curve.x[place] - 0.9))
    summary = (
        f"Accepting only the most confident 90\u202f% of the answers ({final.name}) leaves {percent(curve.y[at])} "
        f"errors among them, instead of {percent(1 - final.accuracy.value)} among all."
    )
    names = [f"{variant.name}, AURC {fixed(variant.aurc, 4)}" for variant in report.variants]
    drawing = element("div", charts.risk_coverage(report.variants), class_="panel")
    caption = "The share of errors among the most confident inputs, against the share of inputs that these make up."
    return [element("p", summary), _figure("Risk and coverage.", caption, drawing, key=charts.key(names))]


def _scales(scale_curves: ScaleCurves | None, report: Report) -> list[Child]:
    introduction = element(
        "p",
        prose(
            "The logits are N(ĝ/T, T_c P/T²): the temperature T divides them, the covariance scale T_c multiplies "
            f"their covariance. Here T = {significant(report.temperature, 4)} and T_c = "
            f"{significant(report.covariance_scale, 4)}. Both flatten the probabilities, so one can stand in "
            f"for the other, but only T_c gives error bars.{_softening(report.softening)}"
        ),
    )
    if scale_curves is None:
        return [introduction, *_missing(report, "curves")]
    with_covariance = f"T_c = {significant(scale_curves.covariance_scale)}"
    panels = (
        element(
            "div", charts.temperature_curve(scale_curves), charts.key([with_covariance, "T_c = 0"]), class_="panel"
        ),
        element(
            "div",
            charts.scale_curve(scale_curves),
            charts.key(
                [
                    f"T = {significant(scale_curves.temperature)}",
                    *(["the best T for each T_c"] if scale_curves.ridge else []),
                ]
            ),
            class_="panel",
        ),
    )
    caption = (
        f"The NLL of {count(scale_curves.inputs)} inputs, spread over the data, as T and T_c vary. Dotted vermilion "
        "lines mark the values in use. A flat curve on the right means that these data hardly determine T_c."
    )
    return [introduction, _figure("T and T_c.", prose(caption), panels)]


def _softening(softening: float) -> str:
    """What the softening does, for reports that have one."""
    if softening == 0:
        return ""
    return (
        f" The softening c = {significant(softening, 4)} raises the temperature of inputs whose logits are uncertain: "
        "T becomes T √(1 + c v), with v the mean variance of their contrasts before T and T_c."
    )


def _classes(report: Report) -> list[Child]:
    rows = sorted(report.class_rows, key=lambda row: row.number)
    note = ""
    if len(rows) > _CLASS_ROWS:
        worst = sorted(rows, key=lambda row: (row.recall != row.recall, row.recall))[:_CLASS_ROWS]
        rows = sorted(worst, key=lambda row: row.number)
        note = f" Shown are the {_CLASS_ROWS} of {count(len(report.class_rows))} classes with the lowest recall."
    noun = "positions" if report.decisions else "inputs"
    headings = (
        "class",
        noun,
        "recall",
        "predicted",
        "precision",
        "confidence",
        "claimed − right",
        "std",
        "most often taken for",
    )
    body = [
        (
            row.name,
            count(row.inputs),
            fixed(100 * row.recall, 1),
            count(row.predicted),
            fixed(100 * row.precision, 1),
            fixed(100 * row.confidence, 1),
            fixed(100 * (row.confidence - row.precision), 1),
            fixed(100 * row.std, 1),
            row.confused_with or "–",
        )
        for row in rows
    ]
    caption = (
        f"{report.variants[-1].name.capitalize()}. Recall: the share of the {noun} of a class that are predicted as "
        "it. Precision, confidence, their difference and the standard deviation of the confidence are over the "
        f"{noun} predicted as it. All in per cent.{note}"
    )
    return [table("classes-caption", caption, headings, body, words=(8,))]


def _outliers(outliers: Outliers) -> list[Child]:
    body = [
        (
            row.name,
            f"{fixed(row.auroc.value, 3)}",
            f"{fixed(row.auroc.low, 3)} to {fixed(row.auroc.high, 3)}",
            significant(row.inside),
            significant(row.outside),
        )
        for row in outliers.rows
    ]
    headings = ("score", "AUROC", "95\u202f%", "median, these", "median, elsewhere")
    caption = (
        f"How well scores tell the {count(outliers.inputs)} inputs of {outliers.name} from these: the AUROC is the "
        "probability that one of them has a higher score than one of these. 0.5 is chance."
    )
    drawing = element("div", charts.roc(outliers), class_="panel")
    names = [row.name for row in outliers.rows]
    return [
        table("outliers-caption", caption, headings, body),
        _figure(
            "ROC.",
            "True-positive rate against false-positive rate, as the threshold varies.",
            drawing,
            key=charts.key(names),
        ),
    ]


def _linearisation(check: Linearisation | None, report: Report) -> list[Child]:
    introduction = element(
        "p",
        "Error bars come from the delta method, which treats the logits as linear in the parameters. Whole networks "
        "drawn from the posterior show what that leaves out. For the last layer alone the delta method is exact, "
        "and only the noise of the draws remains.",
    )
    if check is None:
        return [introduction, *_missing(report, "linearisation")]
    caption = (
        f"The standard deviation of the most likely class’s probability, for {check.inputs} inputs spread over the "
        f"data: by {check.draws} drawn networks, against the delta method. The median of their ratio is "
        f"{fixed(check.ratio.value, 2)} (quartiles {fixed(check.ratio.low, 2)} and {fixed(check.ratio.high, 2)}); "
        f"the PMFs differ by {percent(check.distance, 2)} in total variation on average, of which "
        f"{percent(check.noise, 2)} is noise of the draws."
    )
    drawing = element("div", charts.linearisation(check), class_="panel")
    return [introduction, _figure("Delta method and drawn networks.", caption, drawing)]


def _missing(report: Report, word: str) -> list[Child]:
    return [element("p", prose(line), class_="missing") for line in report.missing if word in line]
