"""The documents keep their word: the example runs, and the functions and tests that they name exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from places import ROOT
from processes import environment, service_process

sys.path.insert(0, str(ROOT / "website"))

import pages

TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
SOURCES = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))


def blocks_of(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_the_readme_prints_what_it_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The opening of the site has the same example."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    (example,), (shown,) = (blocks_of(ROOT / "README.md", language) for language in ("python", "text"))
    assert len([line for line in example.splitlines() if line]) <= 5
    names: dict[str, Any] = {}
    with torch.random.fork_rng(devices=[]):
        exec(compile(example, "README.md", "exec"), names)
    assert pages.same(shown, capsys.readouterr().out)
    # The story: what the network alone says of the second point.
    says = 100 * float(names["model"](torch.tensor([[4.0, 4.0]]).double()).softmax(1).detach().max())
    mean, deviation = re.findall(r"(0\.\d+) ± (0\.\d+)", shown)[1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f'says "{says:.0f} %"' in readme
    assert f"**{100 * float(mean):.0f} ± {100 * float(deviation):.0f} %**" in readme
    opening = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for part in (example, shown, f'says "{says:.0f} %"'):
        assert part in opening


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 600


def test_the_request_of_the_command_line_page_is_one_that_the_service_takes() -> None:
    pytest.importorskip("fastapi", reason="the service is errbar[serve]")
    (request,) = (block for block in blocks_of(ROOT / "docs" / "command-line.md", "sh") if block.startswith("curl"))
    show = 'curl() { for last; do :; done; printf %s "$last"; }\n'
    said = subprocess.run(["sh", "-e", "-c", show + request], capture_output=True, text=True, check=True)
    body = json.loads(said.stdout)
    assert [len(one) for one in body["inputs"]] == [64]
    assert set(body) == {"inputs", "risk"}


@pytest.mark.slow
def test_the_commands_of_the_readme_run(tmp_path: Path) -> None:
    (script,) = blocks_of(ROOT / "README.md", "sh")
    install, *commands = [line.partition("#")[0].split() for line in script.splitlines()]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert install == ["pip", "install", f"'.[{','.join(name for name in extras if name in ('demo', 'serve'))}]'"]
    assert [command[:2] for command in commands] == [["errbar", "demo"], ["errbar", "serve"]]
    run = [sys.executable, "-m", *commands[0]]
    subprocess.run(run, cwd=tmp_path, env=environment(), capture_output=True, timeout=900, check=True)
    assert list(tmp_path.rglob("reliability.png"))
    with service_process(tmp_path) as (_, said):
        (request,) = (block for block in blocks_of(ROOT / "docs" / "command-line.md", "sh") if "curl" in block)
        ask = ["sh", "-e", "-c", request.replace("http://", "").replace("localhost:8000", said["url"])]
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True)
        assert len(json.loads(answer.stdout)["predictions"][0]["pmf"]) == 10


@pytest.mark.slow
def test_the_commands_of_the_command_line_page_run_in_an_empty_folder(tmp_path: Path) -> None:
    blocks = blocks_of(ROOT / "docs" / "command-line.md", "sh")
    (script,) = (block for block in blocks if "errbar predict" in block)
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
    (serve,) = (block for block in blocks if block.startswith("errbar serve calibrated"))
    with service_process(folder, *shlex.split(serve)[2:]) as (_, said):
        assert said["posteriors"] == ["calibrated"]


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
