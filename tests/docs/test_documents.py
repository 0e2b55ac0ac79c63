"""The documents keep their word: the example runs, and the functions and tests that they name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from places import ROOT
from processes import environment

TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
SOURCES = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))


def test_the_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names: dict[str, object] = {}
        exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("tensor(") == 5
    assert "nan" not in printed


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_an_empty_folder(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (script,) = (block for block in re.findall(r"```sh\n(.*?)```", readme, re.DOTALL) if "errbar predict" in block)
    programs, folder = tmp_path / "programs", tmp_path / "folder"
    programs.mkdir(), folder.mkdir()
    # These commands as an installed package has them, for whatever Python runs the tests.
    for name, module in (("errbar", "-m errbar"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    command = ["sh", "-e", "-c", script]
    run = subprocess.run(
        command, cwd=folder, env=environment(PATH=path), capture_output=True, text=True, timeout=500, check=False
    )
    assert run.returncode == 0, run.stderr
    assert len((folder / "predictions.csv").read_text().splitlines()) == 1 + 897
    assert (folder / "both.safetensors").exists()
    assert len((folder / "together.csv").read_text().splitlines()) == 1 + 897


def test_every_test_that_the_equations_name_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "equations.md").read_text()))
    assert len(named) > 20
    assert sorted(name for name in named if f"def {name}(" not in TESTS) == []
    files = set(re.findall(r"`(test_\w+\.py)`", (ROOT / "docs" / "equations.md").read_text()))
    assert sorted(name for name in files if not [*(ROOT / "tests").rglob(name)]) == []


@pytest.mark.parametrize("document", ["equations.md", "notation.md"])
def test_every_function_that_a_document_names_exists(document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    names = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`", text)}
    ignored = {"py", "eta", "ggn"}
    missing = [
        name
        for name in sorted(names - ignored)
        if not name.startswith("test_") and not re.search(rf"\b{re.escape(name)}\b", SOURCES)
    ]
    assert missing == []


def test_links_between_documents_lead_somewhere() -> None:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_example_of_the_drift_page_raises_its_alarms_after_the_drift(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "drift.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exec(compile(example, "drift.md", "exec"), names)
    assert "mutual_information: " in capsys.readouterr().out
    assert min(alarm.at for alarm in names["monitor"].alarms) > 700
    assert names["again"].alarms == ()
