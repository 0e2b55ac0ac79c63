"""The documentation keeps its word: its code runs and prints what the pages say, and the site builds without a warning.

`website/pages.py` says what a block is. Pages whose code is run by another test are named here, and so is every block
that is not run.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from places import ROOT

sys.path.insert(0, str(ROOT / "website"))

import check
import pages

# Blocks that are marked "not run: …", page by page.
NOT_RUN = {
    "coming-from-laplace-torch.md": 1,
    "quickstart.md": 1,
    "tutorials/deployment.md": 3,
    "tutorials/ensemble.md": 1,
    "tutorials/thousand-classes.md": 7,
}
# Blocks without a language are illustrations, in pages that are made by other means.
WITHOUT_LANGUAGE = {"results.md": 1}
PAGES = [page for page in pages.all_pages() if any(b.is_run for b in pages.blocks((pages.DOCS / page).read_text()))]


def text(page: str) -> str:
    return (pages.DOCS / page).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- the code


@pytest.mark.parametrize("page", [page for page in PAGES if page not in (pages.RESNET, *pages.RUN_ELSEWHERE)])
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    for block, printed, output in pages.run_page(page, tmp_path):
        pages.require_same(page, block, printed, output)


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")  # an untrained network has no best temperature
def test_the_page_on_a_resnet_runs_on_stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from errbar.experiments import datasets
    from errbar.experiments.resnet import cifar_resnet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_stand_ins(tmp_path / "data", cifar_resnet(20))
    monkeypatch.setattr(datasets, "read_cifar10", functools.partial(datasets.read_cifar10, verify=False))
    count = 0
    for _, printed, output in pages.run_page(pages.RESNET, tmp_path):
        assert bool(output) == (printed is not None)
        count += 1
    assert count == len([block for block in pages.blocks(text(pages.RESNET)) if block.is_run])


@pytest.mark.slow
def test_the_page_on_a_resnet_prints_what_it_says_of_the_real_files(tmp_path: Path) -> None:
    given = os.environ.get("ERRBAR_DATA")
    if given is None:
        pytest.skip("ERRBAR_DATA names no folder with cifar10/ and pretrained_cifar10/")
    pages.link_real_files(Path(given), tmp_path / "data")
    for block, printed, output in pages.run_page(pages.RESNET, tmp_path):
        pages.require_same(pages.RESNET, block, printed, output)


def write_stand_ins(folder: Path, model: torch.nn.Module) -> None:
    """CIFAR-10 in its binary form, of few pictures that differ by class, and a checkpoint as its authors wrote it."""
    generator = torch.Generator().manual_seed(0)
    (folder / "cifar10").mkdir(parents=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        labels = torch.arange(60) % 10
        pictures = torch.randint(0, 128, (60, 3072), generator=generator) + 10 * labels[:, None]
        records = [struct.pack("B", int(y)) + bytes(row.tolist()) for y, row in zip(labels, pictures, strict=True)]
        (folder / "cifar10" / f"{name}.bin").write_bytes(b"".join(records))
    # The real file is older than the counters of batch norms.
    state = {f"module.{k}": v for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save({"state_dict": state, "best_prec1": 91.7}, folder / "resnet20-12fca82f.th")


# ----------------------------------------------------------------------------------------- nothing is skipped silently


def test_every_block_that_is_not_run_is_marked_and_counted() -> None:
    marked, bare, other = {}, {}, []
    for page in pages.all_pages():
        found = pages.blocks(text(page))
        marked[page] = sum(block.is_code and not block.is_run for block in found)
        bare[page] = sum(block.language == "" for block in found)
        other += [f"{page}: {block.language}" for block in found if block.language not in ("", *LANGUAGES)]
    assert {page: count for page, count in marked.items() if count} == NOT_RUN
    assert {page: count for page, count in bare.items() if count} == WITHOUT_LANGUAGE
    assert other == []


LANGUAGES = ("python", "sh", "text", "math")


def test_every_reason_for_not_running_a_block_is_given() -> None:
    for page in pages.all_pages():
        for block in pages.blocks(text(page)):
            if block.is_code and block.title:
                assert re.match(r"(not run: \w|file: [\w.]+$)", block.title), f"{page}, line {block.line}"


def test_what_is_said_to_be_printed_follows_code_that_is_run() -> None:
    for page in pages.all_pages():
        found = pages.blocks(text(page))
        for before, block in zip([None, *found], found, strict=False):
            if block.language == "text" and block.title:
                assert block.title in ("printed", "printed, for example"), f"{page}, line {block.line}"
                assert before is not None, page
                assert before.is_run, f"{page}, line {block.line}"


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, where in pages.RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / where).read_text()


# ---------------------------------------------------------------------------------------------------- the comparison


@pytest.mark.parametrize(
    ("shown", "output", "verdict"),
    [
        ("T = 1.24", "T = 1.26", True),
        ("T = 1.24", "T = 1.29", False),
        ("800 samples", "801 samples", False),
        ("0.98 ± 0.01", "0.98 ± 0.03", True),
        ("0.98 ± 0.01", "0.98 ± 0.06", False),
        ("right", "wrong", False),
        ("", "something", False),
        ("-0.5", "0.5", False),
        ("1,234 parameters", "1,235 parameters", False),
        ("a  b\n", "a b", True),
        ("class 2: 0.10", "class 3: 0.10", False),
        ("1.0e-05", "1.1e-05", True),
        ("1.0e-05", "1.0e-04", False),
    ],
)
def test_words_are_compared_exactly_and_numbers_up_to_rounding(shown: str, output: str, verdict: bool) -> None:
    assert pages.same(shown, output) is verdict


def test_examples_are_compared_by_their_words() -> None:
    assert pages.same("took 3.1 s", "took 97.5 s", exactly=False)
    assert pages.same("input 23 µs", "input 2,077 µs", exactly=False)
    assert not pages.same("took 3.1 s", "lost 3.1 s", exactly=False)


def test_a_page_that_says_something_else_is_refused() -> None:
    block = pages.Block("python", "", "print(1)\n", 3)
    with pytest.raises(pages.MismatchError, match=r"line 3: the page says\n\(nothing\)"):
        pages.require_same("a.md", block, None, "1\n")
    with pytest.raises(pages.MismatchError, match="line 7"):
        pages.require_same("a.md", block, pages.Block("text", "printed", "2\n", 7), "1\n")


def test_blocks_are_found_wherever_they_are() -> None:
    page = '# t\n\n```python title="file: a.py"\nx = 1\n```\n\n!!! note\n\n    ```sh\n    errbar info\n    ```\n'
    first, second = pages.blocks(page)
    assert (first.language, first.title, first.source, first.line) == ("python", "file: a.py", "x = 1\n", 4)
    assert (second.language, second.source, second.line, second.indent) == ("sh", "errbar info\n", 10, "    ")
    with pytest.raises(pages.MismatchError, match="line 1 has no end"):
        pages.blocks("```python\nx\n")


# ------------------------------------------------------------------------------------------------------------ the site


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the site is made of."""
    pytest.importorskip("zensical", reason="the site is built with errbar[docs]")
    folder = tmp_path_factory.mktemp("site").resolve()
    for name in ("docs", "website"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    (folder / "src").symlink_to(ROOT / "src")
    return folder


def build(project: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(project / "website"), str(ROOT / "src")])}
    # Nothing may be fetched: whoever tries meets a proxy that is not there.
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(project: Path) -> Path:
    built = build(project)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "griffe" not in built.stdout + built.stderr  # docstrings that say something else than the signature
    return project / "build" / "site"


def test_the_site_builds_and_every_link_leads_somewhere(site: Path) -> None:
    assert check.problems(site) == []
    for page in pages.all_pages():
        assert (site / page).with_suffix(".html").is_file()


def test_every_page_is_in_the_navigation() -> None:
    import tomllib

    def leaves(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        for below in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from leaves(below)

    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(leaves(nav)) == pages.all_pages()


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    import errbar

    anchors = set().union(*(check.read(path).anchors for path in (site / "reference").glob("*.html")))
    names = {name for name in errbar.__all__ if not name.startswith("_")}
    missing = [name for name in sorted(names) if not any(a.split(".")[-1] == name for a in anchors)]
    assert missing == []


def test_formulas_are_in_the_pages_and_need_no_script(site: Path) -> None:
    page = (site / "how-it-works.html").read_text()
    assert page.count("<math") == 9
    assert "\\frac" not in page
    assert "\\mathcal" not in page


def test_a_list_needs_no_empty_line_before_it() -> None:
    markdown = pytest.importorskip("markdown")
    import lists

    def html(text: str) -> str:
        made: str = markdown.markdown(text, extensions=[lists.makeExtension()])
        return made.replace("\n", "")

    assert html("Decisions:\n- one\n  and on\n- two") == "<p>Decisions:</p><ul><li>one  and on</li><li>two</li></ul>"
    assert html("as long as\n1. one\n2. two") == "<p>as long as</p><ol><li>one</li><li>two</li></ol>"
    assert html("T = 1\n- 2") == "<p>T = 1</p><ul><li>2</li></ul>"
    assert html("a word\n-2 of it") == "<p>a word-2 of it</p>"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["[nowhere](nowhere.md)", "[no such part](index.md#no-such-part)", "[nothing][errbar.nothing]"],
            ["page does not exist", "anchor does not exist", "unresolved autoref"],
        ),
        (["::: errbar.nothing"], ["errbar.nothing could not be found"]),
    ],
)
def test_what_leads_nowhere_stops_the_build(tmp_path: Path, lines: list[str], said: list[str]) -> None:
    """With the settings of the site, and one page."""
    pytest.importorskip("zensical", reason="the site is built with errbar[docs]")
    settings, count = re.subn(
        r"^nav = \[.*?^\]$", "", (ROOT / "zensical.toml").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert count == 1
    (tmp_path / "zensical.toml").write_text(settings)
    (tmp_path / "website").symlink_to(ROOT / "website")
    (tmp_path / "src").symlink_to(ROOT / "src")
    shutil.copytree(ROOT / "docs" / "assets", tmp_path / "docs" / "assets")
    page = tmp_path / "docs" / "index.md"
    page.write_text("# A page\n\nAll is well.\n")
    fine = build(tmp_path)
    assert fine.returncode == 0, fine.stdout + fine.stderr
    page.write_text("# A page\n\n" + "\n\n".join(lines) + "\n")
    broken = build(tmp_path)
    assert broken.returncode != 0
    output = re.sub(r"\x1b\[[\d;]*m", "", broken.stdout + broken.stderr)
    assert [sentence for sentence in said if sentence not in output] == []


def test_what_comes_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import url('https://fonts.example/x.css'); b { background: url(data:x) }")
    (tmp_path / "index.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="https://fine.example">x</a>'
        '<a href="b.html">y</a><a href="#part">z</a><p id="here"></p><a href="#here">h</a><img src="//c.example/i.png">'
    )
    assert sorted(check.problems(tmp_path)) == [
        "a.css fetches https://fonts.example/x.css from elsewhere.",
        "index.html fetches //c.example/i.png from elsewhere.",
        "index.html fetches https://cdn.example/x.js from elsewhere.",
        "index.html links to #part; that page has no such anchor.",
        "index.html links to b.html, which does not exist.",
    ]
    assert check.problems(tmp_path / "empty") == [f"{tmp_path / 'empty'} holds no pages; build the site first."]
