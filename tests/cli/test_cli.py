"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import errbar
from errbar import demo
from errbar.cli import main


def test_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(main.application(), ["--version"])
    assert result.exit_code == 0
    assert result.output == f"errbar {errbar.__version__}\n"


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(main.application(), ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_demo_is_a_command_of_its_own_with_options() -> None:
    result = CliRunner().invoke(main.application(), ["demo", "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert "output" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo"], (Path("demo-output"), True)),
        (["demo", "--output", "elsewhere", "--no-progress"], (Path("elsewhere"), False)),
    ],
)
def test_demo_passes_its_options_on(
    arguments: list[str], expected: tuple[Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Path, bool]] = []
    monkeypatch.setattr(demo, "run", lambda output, progress, quiet: calls.append((output, progress)))
    assert CliRunner().invoke(main.application(), arguments).exit_code == 0
    assert calls == [expected]


def test_a_mistake_is_one_sentence_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit, match=r"^1$"):
        main.main(["demo", "--output", str(file)])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"errbar: The output {file} is a file; expected a folder for the figures.\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=r"^1$"):
        main.main(["--version"])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "pip install '.[cli]' in a clone of errbar" in printed
    assert package in printed


def test_python_m_errbar_is_errbar() -> None:
    result = subprocess.run([sys.executable, "-m", "errbar", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"errbar {errbar.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["fit", "--help"], ["evaluate", "--help"], ["fit"]])
def test_what_computes_nothing_imports_no_torch(arguments: list[str]) -> None:
    script = (
        "import contextlib, io, sys\nfrom errbar.cli.main import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main({arguments!r})\n"
        "print([name for name in ('torch', 'numpy', 'errbar.report', 'errbar.plots') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = subprocess.run([sys.executable, "-m", "errbar", "nonsense"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "nonsense" in result.stderr
    assert "Traceback" not in result.stderr
