"""The notebooks of examples/, run as a kernel runs them, so that they show what they print before anybody runs them.

python website/notebooks.py              stores the present outputs in examples/*.ipynb
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import pages

EXAMPLES = pages.DOCS.parent / "examples"
NAMES = ("table", "pictures")
_DOTS_PER_INCH = 80


def path_of(name: str) -> Path:
    return EXAMPLES / f"{name}.ipynb"


def read(name: str) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(path_of(name).read_text(encoding="utf-8"))
    return book


def run(book: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each cell of code with its outputs as they are now: what is printed, and the value of a last expression."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    codes = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    with torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(codes, start=1):
            place = f"cell {number}"
            tree = ast.parse("".join(cell["source"]), place)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            value = None
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(tree, place, "exec"), names)
                if isinstance(last, ast.Expr):
                    value = eval(compile(ast.Expression(last.value), place, "eval"), names)
            outputs: list[dict[str, Any]] = []
            if printed.getvalue():
                outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
            if value is not None:
                result = {"data": _shown(value), "execution_count": number, "metadata": {}}
                outputs.append({**result, "output_type": "execute_result"})
            yield cell, outputs


def _shown(value: Any) -> dict[str, Any]:
    """A value by kinds of content, as a kernel has it."""
    data: dict[str, Any] = {"text/plain": _lines(repr(value))}
    if isinstance(value, Figure):
        target = io.BytesIO()
        value.savefig(target, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None})
        data["image/png"] = base64.b64encode(target.getvalue()).decode()
    elif hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    return data


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> int:
    for name in NAMES:
        book = read(name)
        for number, (cell, outputs) in enumerate(run(book), start=1):
            cell["outputs"], cell["execution_count"] = outputs, number
        path_of(name).write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
