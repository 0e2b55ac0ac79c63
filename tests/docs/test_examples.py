"""The examples run, and say what they should; the edges name what they need."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import sys
import warnings
from typing import Any

import pytest
import torch

import errbar
from places import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")
def test_a_model_of_the_hugging_face_trainer_gets_error_bars(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", module="transformers|accelerate|torch")
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        runpy.run_path(str(EXAMPLES / "hugging_face_trainer.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "800 samples, 323 parameters" in printed
    (accuracy,) = re.findall(r"^accuracy (0\.\d+)$", printed, re.MULTILINE)
    assert float(accuracy) > 0.6
    assert len(re.findall(r"0\.\d+ ± 0\.\d+", printed)) == 9


@pytest.mark.parametrize(
    ("module", "missing", "advice"),
    [
        ("errbar.sklearn", ["sklearn", "sklearn.base"], r"scikit-learn 1.6 or newer.*pip install '\.\[sklearn\]'"),
        ("errbar.lightning", ["lightning", "pytorch_lightning"], "pip install lightning, or pytorch-lightning"),
    ],
)
def test_what_an_edge_needs_is_named_where_it_is_missing(
    module: str, missing: list[str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errbar.MissingExtraError, match=advice):
        importlib.import_module(module)


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")
@pytest.mark.parametrize("name", ["table", "pictures"])
def test_the_cells_of_a_notebook_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a kernel runs them: the value of a last expression is shown, as HTML where it has some."""
    pytest.importorskip("sklearn")
    if name == "table":
        pytest.importorskip("pandas")
    book = json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4
    names: dict[str, Any] = {"__name__": "__notebook__"}
    shown = []
    with torch.random.fork_rng(devices=[]):
        for number, cell in enumerate(book["cells"]):
            if cell["cell_type"] != "code":
                continue
            assert cell["outputs"] == []
            tree = ast.parse("".join(cell["source"]), f"{name}.ipynb, cell {number}")
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
                # A figure of matplotlib has the method, and returns None.
                page = value._repr_html_() if hasattr(value, "_repr_html_") else None
                shown.append(page or repr(value))
    assert "nan" not in capsys.readouterr().out
    assert any(str(text).startswith("Posterior: ") for text in shown)
    assert any("<svg" in text for text in shown)
