"""Formulas in the documentation: LaTeX in a `math` block becomes MathML when the site is built.

Browsers render MathML themselves, so the pages need no scripts or external fonts; GitHub renders such blocks too.
"""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def display(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """A formatter for `pymdownx.superfences`: each non-empty line is a separate formula."""
    formulas = [convert(line, display="block") for line in source.splitlines() if line.strip()]
    return f'<div class="{css_class}">{"".join(formulas)}</div>'
