"""HTML and SVG from Python, with everything escaped that is not `Markup` already.

Class names, file names and commands come from users. Whoever puts a plain text into an element or an attribute gets
it escaped; there is no other way in.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = frozenset({"meta", "img", "br", "hr", "col"})
# SVG may close elements that have no content by themselves; HTML may not.
_CLOSED = frozenset({"line", "rect", "path", "circle", "ellipse", "polyline", "use"})


class Markup(str):
    """Text that is HTML or SVG."""

    __slots__ = ()


Child = str | int | float | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """<name attributes>children</name>.

    A plain text is escaped, None is nothing, and a list is its parts. Underscores in the names of attributes are
    hyphens, one at the end is dropped (`class_`); an attribute that is None or False is left out.

    >>> element("a", "R&D <b>", class_="x", aria_label='"', hidden=True)
    '<a class="x" aria-label="&quot;" hidden>R&amp;D &lt;b&gt;</a>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    inside = text(children)
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    if name in _CLOSED and not inside:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{inside}</{name}>")


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
    written = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if written == "-0" else written


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    written = value if isinstance(value, str) else number(value)
    return f' {name}="{html.escape(written)}"'
