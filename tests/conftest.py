"""The package is imported with the shapes in its annotations checked at every call."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

assert "errbar" not in sys.modules, "errbar was imported before its shapes could be checked"

with install_import_hook("errbar", "shapes.check_shapes"):
    import errbar

    # Names are imported when they are first used, so here, while the hook is at work.
    for name in errbar.__all__:
        getattr(errbar, name)

import command_line  # noqa: E402 - it imports errbar, and the hook has to come first


@pytest.fixture(scope="module")
def workspace_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    command_line.write_workspace(folder)
    return folder


@pytest.fixture
def workspace(workspace_folder: Path, monkeypatch: pytest.MonkeyPatch) -> command_line.Workspace:
    """The folder of `command_line.py` as the current one, with its module importable."""
    monkeypatch.chdir(workspace_folder)
    monkeypatch.setattr(sys, "path", [str(workspace_folder), *sys.path])
    net = importlib.import_module("tiny_net")
    x = command_line.arrays()
    parts = [(x[f"x_{name}"], x[f"y_{name}"]) for name in ("train", "validation", "test")]
    return command_line.Workspace(workspace_folder, net.trained(), net.other(), *parts)


@pytest.fixture(scope="session")
def curvlinops() -> types.ModuleType:
    """The library; what its own imports warn about is not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("curvlinops")


@pytest.fixture
def no_jacobians(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Jacobian of a sample by itself is a failure."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a generic Jacobian was formed")

    monkeypatch.setattr("errbar._derivative.layerwise.each_by_itself", forbidden)
    monkeypatch.setattr("errbar._derivative.route.each_by_itself", forbidden)
