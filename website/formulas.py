"""Formulas of the documentation: LaTeX in a block of the language `math` becomes MathML when the site is built.

Browsers draw MathML themselves, so the pages need no script and no fonts from elsewhere for it; and GitHub draws such
blocks too.
"""

from __future__ import annotations

from typing import Any

from latex2mathml.converter import convert


def display(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **more: Any) -> str:
    """A formatter for `pymdownx.superfences`: each line that is not empty is a formula of its own."""
    formulas = [convert(line, display="block") for line in source.splitlines() if line.strip()]
    return f'<div class="{css_class}">{"".join(formulas)}</div>'
