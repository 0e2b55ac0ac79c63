"""The code blocks of the documentation: read, run in order, and compared with the output that the pages show.

    python website/pages.py                  run all pages, and report differences
    python website/pages.py --refresh PAGE   run a page, and update the output that it shows

With --data DIR the page on the ResNet is run too; it needs CIFAR-10 and the weights.

A page has one namespace and one empty folder. The language and the title of a block, both visible to readers, say what
it is:

- `python`: run. With the title "file: NAME" it is written to a file of the folder instead.
- `sh`: run with `sh -e`; where all lines are `errbar …`, in this process, which saves the import of torch.
- `text` with the title "printed": what the block before it prints. Words have to be the same, whole numbers too; other
  numbers may differ by three units of their last digit or two per cent. "printed, for example": words only.
- "not run: REASON" as the title of a `python` or `sh` block: not run. The tests count these.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESNET = "tutorials/resnet.md"
# Pages that another test runs, and checks the result.
RUN_ELSEWHERE = dict.fromkeys(("command-line.md", "drift.md", "index.md"), "docs/test_documents.py")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<options>.*)$")
_TITLE = re.compile(r'title="([^"]*)"')
_NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])", re.ASCII)
# Fingerprints and versions differ from machine to machine.
_STAMP = re.compile(r"\b[0-9a-f]{12,}\b|\b\d+\.\d+\.\d+[\w.+]*", re.ASCII)
_UNITS_OF_THE_LAST_DIGIT, _SHARE = 3, 0.02


@dataclass(frozen=True)
class Block:
    """A fenced block: `line` is the number of its first line of content, from one; `indent` is that of the fence."""

    language: str
    title: str
    source: str
    line: int
    indent: str = ""

    @property
    def is_code(self) -> bool:
        return self.language in ("python", "sh")

    @property
    def is_run(self) -> bool:
        return self.is_code and not self.title.startswith("not run:")

    @property
    def is_printed(self) -> bool:
        return self.language == "text" and self.title.startswith("printed")


class MismatchError(AssertionError):
    """The code of a page prints something other than the page shows."""


def all_pages() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page in order."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        start, indent = number, opening["indent"]
        while number < len(lines) and lines[number].strip() != opening["ticks"]:
            number += 1
        if number == len(lines):
            raise MismatchError(f"The block that begins on line {start} has no end.")
        content = [line.removeprefix(indent) for line in lines[start:number]]
        title = _TITLE.search(opening["options"])
        source = "".join(f"{line}\n" for line in content)
        found.append(Block(opening["language"], title[1] if title else "", source, start + 1, indent))
        number += 1
    return found


@dataclass
class Runner:
    """Runs the blocks of one page, in `folder`."""

    page: str
    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})

    def run(self, block: Block) -> str:
        """What the block prints."""
        if block.title.startswith("file: "):
            (self.folder / block.title.removeprefix("file: ")).write_text(block.source, encoding="utf-8")
            return ""
        return self._python(block) if block.language == "python" else self._shell(block)

    def _python(self, block: Block) -> str:
        # Empty lines before it, so that a traceback has the line number of the page.
        code = compile("\n" * (block.line - 1) + block.source, str(DOCS / self.page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self.names)
        return printed.getvalue()

    def _shell(self, block: Block) -> str:
        lines = block.source.replace("\\\n", " ").splitlines()
        if all(line.startswith("errbar ") for line in lines):
            return "".join(_errbar(shlex.split(line, comments=True)[1:]) for line in lines)
        command = ["sh", "-e", "-c", block.source]
        run = subprocess.run(command, env=_environment(self.folder), capture_output=True, text=True, check=False)
        if run.returncode:
            raise MismatchError(f"{self.page}, line {block.line}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
        return run.stdout


def _errbar(arguments: list[str]) -> str:
    """`errbar` with these arguments in this process; progress and notices, which go to standard error, are dropped."""
    from errbar.cli import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main(arguments)
        except SystemExit as left:
            code = left.code
    if code not in (0, None):
        raise MismatchError(f"errbar {shlex.join(arguments)}: exit code {code}\n{out.getvalue()}{err.getvalue()}")
    return out.getvalue()


def _environment(folder: Path) -> dict[str, str]:
    """`errbar` and `python` as commands of the Python that runs this."""
    programs = folder / ".programs"
    programs.mkdir(exist_ok=True)
    for name, module in (("errbar", "-m errbar"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """`folder` as the current folder, with its modules importable; everything is restored afterwards."""
    import torch

    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # Other people's packages warn about each other.
            warnings.filterwarnings("ignore", module="transformers|accelerate|onnxscript|torch")
            yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", "") or "").startswith(str(folder)):
                del sys.modules[name]


def run_page(page: str, folder: Path) -> Iterator[tuple[Block, Block | None, str]]:
    """Run a page: each executed block, the block with its expected output if there is one, and its actual output."""
    found = blocks((DOCS / page).read_text(encoding="utf-8"))
    runner = Runner(page, folder)
    with inside(folder):
        for block, following in zip(found, [*found[1:], None], strict=True):
            if block.is_run:
                yield block, following if following and following.is_printed else None, runner.run(block)


def require_same(page: str, block: Block, printed: Block | None, output: str) -> None:
    """Refuse output that the page does not show, or shows differently."""
    shown = "" if printed is None else printed.source
    exactly = printed is None or printed.title == "printed"
    if not same(shown, output, exactly=exactly):
        where = f"{page}, line {(printed or block).line}"
        raise MismatchError(f"{where}: the page says\n{shown or '(nothing)'}\nand the code prints\n{output}")


def same(shown: str, output: str, *, exactly: bool = True) -> bool:
    """Whether two texts have the same words, and, if `exactly`, numbers that are the same up to rounding."""
    shown, output = _STAMP.sub("stamp", shown), _STAMP.sub("stamp", output)
    if _words(shown) != _words(output):
        return False
    pairs = zip(_NUMBER.findall(shown), _NUMBER.findall(output), strict=True)
    return not exactly or all(_close(a, b) for a, b in pairs)


def _words(text: str) -> list[str]:
    return _NUMBER.sub(" # ", text).split()


def _close(shown: str, printed: str) -> bool:
    if "." not in shown and "e" not in shown:
        return shown == printed
    a, b = (float(text.replace("−", "-").replace(",", "")) for text in (shown, printed))
    mantissa, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(a - b) <= max(_UNITS_OF_THE_LAST_DIGIT * unit, _SHARE * abs(a)) * (1 + 1e-9)


def refreshed(page: str, folder: Path) -> str:
    """The text of a page with the present output of its blocks."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    for _, printed, output in reversed(list(run_page(page, folder))):
        if printed is not None and not same(printed.source, output, exactly=printed.title == "printed"):
            start = printed.line - 1
            end = start + len(printed.source.splitlines())
            lines[start:end] = [(printed.indent + line).rstrip() for line in output.rstrip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def link_real_files(given: Path, folder: Path) -> None:
    """The files that the page on the ResNet needs, under the names that it uses."""
    folder.mkdir()
    (folder / "cifar10").symlink_to(given.resolve() / "cifar10")
    (folder / "resnet20-12fca82f.th").symlink_to(given.resolve() / "pretrained_cifar10" / "resnet20-12fca82f.th")


def main() -> int:
    usual = [page for page in all_pages() if page not in (RESNET, *RUN_ELSEWHERE)]
    parser = argparse.ArgumentParser(description="Run the code of the documentation.")
    parser.add_argument("pages", nargs="*", help="as in tutorials/digits.md")
    parser.add_argument("--data", type=Path, metavar="DIR", help="with cifar10/ and pretrained_cifar10/")
    parser.add_argument("--refresh", action="store_true", help="write the output into the pages")
    options = parser.parse_args()
    wrong = 0
    for page in options.pages or (usual if options.data is None else [*usual, RESNET]):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            if page == RESNET and options.data is not None:
                link_real_files(options.data, folder / "data")
            if options.refresh:
                (DOCS / page).write_text(refreshed(page, folder), encoding="utf-8")
                continue
            for block, printed, output in run_page(page, folder):
                try:
                    require_same(page, block, printed, output)
                except MismatchError as difference:
                    wrong += 1
                    sys.stderr.write(f"{difference}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
