"""HTML and SVG from Python; everything that is not already `Markup` is escaped.

Class names, file names and commands come from users. Plain text in an element or an attribute is always escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"meta", "img", "br", "hr", "col"})
# Empty SVG elements may close themselves; HTML elements may not.
_CLOSED = frozenset({"line", "rect", "path", "circle", "ellipse", "polyline", "use"})


class Markup(str):
    """Text that is HTML or SVG."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """<name attributes>children</name>.

    Plain text is escaped, None is skipped, and a list is joined. Underscores in the names of attributes become
    hyphens, one at the end is dropped (`class_`); an attribute that is None or False is left out.

    >>> element("a", "R&D <b>", class_="x", aria_label='"', hidden=True)
    '<a class="x" aria-label="&quot;" hidden>R&amp;D &lt;b&gt;</a>'
    """
    attribute_text = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = text(children)
    if name in _VOID:
        return Markup(f"<{name}{attribute_text}>")
    if name in _CLOSED and not inside:
        return Markup(f"<{name}{attribute_text}/>")
    return Markup(f"<{name}{attribute_text}>{inside}</{name}>")


def text(child: Child) -> Markup:
    """A child as markup."""
    if child is None:
        return Markup("")
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return Markup(html.escape(child))
    if isinstance(child, int | float):
        return Markup(number(child))
    return Markup("".join(text(part) for part in child))


def number(value: float) -> str:
    """A coordinate or a count with two decimals at most.

    >>> number(12.3456), number(3.0), number(-0.001)
    ('12.35', '3', '0')
    """
    digits = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    content = value if isinstance(value, str) else number(value)
    return f' {name}="{html.escape(content)}"'
