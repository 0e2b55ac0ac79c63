"""Sentences and tables as markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from errbar.report.markup import Child, Markup, element, text

_SYMBOL = re.compile(r"(?<![A-Za-z0-9_.:])T(_c)?(?![A-Za-z0-9_.:])|(?<![A-Za-z0-9_])T(_c)?(?=[.:] |[.:]$)")
_SET = {"T": "<i>T</i>", "T_c": "<i>T</i><sub>c</sub>"}


def prose(sentence: str) -> Markup:
    """A sentence with T and T_c set as symbols; everything else is escaped.

    >>> prose("T_c < T")
    '<i>T</i><sub>c</sub> &lt; <i>T</i>'
    """
    return Markup(_SYMBOL.sub(lambda match: _SET[match[0]], text(sentence)))


def table(
    anchor: str,
    caption: str,
    headings: Sequence[Child],
    rows: Sequence[Sequence[Child]],
    *,
    words: Sequence[int] = (),
) -> Markup:
    """A table whose first column names the rows, below its caption, which stays in place as the table scrolls.

    A wide table scrolls sideways, with the keyboard too. `words` are the columns that hold words.
    """

    def kind(column: int) -> str | None:
        return "words" if column in words else None

    head = [element("th", heading, scope="col", class_=kind(place)) for place, heading in enumerate(headings)]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_=kind(place)) for place, cell in enumerate(row[1:], start=1)],
        )
        for row in rows
    ]
    grid = element("table", element("thead", element("tr", head)), element("tbody", body), aria_labelledby=anchor)
    title = element("p", prose(caption), id=anchor, class_="caption")
    return Markup(title + scrolled(grid, anchor))


def scrolled(inside: Markup, anchor: str) -> Markup:
    """A part of the page that scrolls sideways; it needs a name and must be able to take the keyboard focus."""
    return element("div", inside, class_="scroll", tabindex="0", role="group", aria_labelledby=anchor)
