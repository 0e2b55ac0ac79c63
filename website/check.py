"""A check of the built site: nothing comes from elsewhere, and every link leads somewhere.

    python website/check.py build/site

The strict build has already checked the links of the sources; this checks the result, templates included.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches on its own, and what only a click fetches.
_FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("audio", "src")}
_FETCHED |= {("link", "href"), ("object", "data"), ("embed", "src"), ("use", "href"), ("img", "srcset")}
_CLICKED = {("a", "href")}


@dataclass
class Page(HTMLParser):
    """The targets and anchors of one page."""

    fetched: list[str] = field(default_factory=list)
    clicked: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if (tag, name) in _FETCHED:
                self.fetched.append(value)
            if (tag, name) in _CLICKED:
                self.clicked.append(value)
            if name in ("id", "name"):
                self.anchors.add(value)


def read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def problems(site: Path) -> list[str]:
    """A sentence for each problem."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} holds no pages; build the site first."]
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} fetches {target} from elsewhere." for target in page.fetched if _is_foreign(target)]
        for target in page.fetched + page.clicked:
            if not _is_foreign(target) and name.name != "404.html":
                found += _unresolved(site, path, target, pages)
    for path in sorted(site.rglob("*.css")):
        targets = re.findall(r"""(?:@import\s+(?:url\()?|url\()\s*["']?([^"')\s]+)""", path.read_text(encoding="utf-8"))
        name = path.relative_to(site)
        found += [f"{name} fetches {target} from elsewhere." for target in targets if _is_foreign(target)]
    return found


def _is_foreign(target: str) -> bool:
    parts = urlsplit(target)
    return parts.scheme not in ("", "data") or bool(parts.netloc)


def _unresolved(site: Path, path: Path, target: str, pages: dict[Path, Page]) -> list[str]:
    parts = urlsplit(target)
    if parts.scheme == "data":
        return []
    there = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
    there = there / "index.html" if there.is_dir() else there
    name = path.relative_to(site)
    if not there.is_file():
        return [f"{name} links to {target}, which does not exist."]
    anchor = unquote(parts.fragment)
    if anchor and there in pages and anchor not in pages[there].anchors and not anchor.startswith("__"):
        return [f"{name} links to {target}; that page has no such anchor."]
    return []


def main() -> int:
    found = problems(Path(sys.argv[1]).resolve())
    for sentence in found:
        sys.stderr.write(f"{sentence}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
