"""Sentences and tables as markup."""

from __future__ import annotations

from collections.abc import Sequence

from errbar.report.markup import Child, Markup, element, text


def prose(sentence: str) -> Markup:
    """A sentence with T_c set as a symbol with an index; everything else is escaped.

    >>> prose("T_c < 1")
    '<i>T</i><sub>c</sub> &lt; 1'
    """
    return Markup(text(sentence).replace("T_c", "<i>T</i><sub>c</sub>"))


def table(
    caption: Child, headings: Sequence[Child], rows: Sequence[Sequence[Child]], *, words: Sequence[int] = ()
) -> Markup:
    """A table whose first column names the rows. It can be scrolled sideways where it is too wide, also by keys.

    `words` are the columns that hold words and not numbers.
    """
    head = [
        element("th", heading, scope="col", class_="words" if n in words else None)
        for n, heading in enumerate(headings)
    ]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_="words" if n in words else None) for n, cell in enumerate(row[1:], start=1)],
        )
        for row in rows
    ]
    made = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return element("div", made, class_="scroll", tabindex="0", role="group", aria_label=_short(caption))


def _short(caption: Child) -> str:
    """The first words of a caption, which name the part of the page."""
    plain = caption if isinstance(caption, str) and not isinstance(caption, Markup) else "Table"
    return plain.split(".")[0].split(":")[0]
