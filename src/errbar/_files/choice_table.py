"""The table of an `autofit` inside the file of the posterior that it chose. Files without one stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from errbar._base.json_fields import Fields
from errbar._curvature.structure import Description
from errbar.errors import DamagedFileError


@dataclass(frozen=True)
class ChoiceTable:
    """What `autofit` tried, as it was printed.

    Attributes:
        reason: the choice in a sentence.
        headings: of the columns; the last one, which marks the row that was chosen, has none.
        rows: the baselines and the candidates, as texts.
        not_tried: candidates that were left out, each with the reason.
    """

    reason: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    not_tried: tuple[str, ...]

    @staticmethod
    def of(cells: Sequence[Sequence[str]], reason: str, not_tried: Sequence[str]) -> ChoiceTable:
        """`cells` are the headings and the rows. Files hold printable texts only."""
        head, *rest = (tuple(map(_printable, row)) for row in cells)
        return ChoiceTable(_printable(reason), head, tuple(rest), tuple(map(_printable, not_tried)))

    def described(self) -> Description:
        rows = [{"cells": list(row)} for row in self.rows]
        return {
            "reason": self.reason,
            "headings": list(self.headings),
            "rows": rows,
            "not_tried": list(self.not_tried),
        }


def read_choice_table(fields: Fields) -> ChoiceTable | None:
    """What `described` wrote; None for posteriors that `autofit` did not choose."""
    if "choice" not in fields:
        return None
    part = fields.part("choice")
    headings = part.texts("headings")
    rows = tuple(row.texts("cells") for row in part.parts("rows"))
    if not headings or any(len(row) != len(headings) for row in rows):
        raise DamagedFileError(f"{fields.where} holds a table whose rows are not as long as its headings.")
    return ChoiceTable(part.text("reason"), headings, rows, part.texts("not_tried"))


def _printable(text: str) -> str:
    """Line breaks become spaces, other characters that cannot be printed question marks."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
