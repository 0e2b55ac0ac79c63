"""A Markdown extension: lists need no empty line before them, as on GitHub, which shows the same pages."""

from __future__ import annotations

import re
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor

_ITEM = re.compile(r"(?:[-*+]|\d+\.) +\S")
# After code blocks are taken out (25), and before HTML is (20).
_PRIORITY = 24


class Lists(Preprocessor):
    """Inserts an empty line between a paragraph and the list that follows it."""

    def run(self, lines: list[str]) -> list[str]:
        result: list[str] = []
        inside = False
        for line in lines:
            is_item = _ITEM.match(line) is not None
            if is_item and not inside and result and result[-1].strip():
                result.append("")
            # Until the next empty line, what follows an item belongs to it.
            inside = is_item or (inside and bool(line.strip()))
            result.append(line)
        return result


class ListExtension(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - Markdown's name
        md.preprocessors.register(Lists(md), "lists_without_empty_lines", _PRIORITY)


def makeExtension(**options: Any) -> ListExtension:  # noqa: N802 - Markdown's name
    return ListExtension(**options)
