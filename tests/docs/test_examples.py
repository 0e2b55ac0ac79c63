"""The examples run, and say what they should; the edges name what they need."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
import warnings
from typing import Any

import pytest
import torch

import errbar
from places import ROOT

sys.path.insert(0, str(ROOT / "website"))

import notebooks
import pages

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


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_shows_what_its_cells_print(name: str) -> None:
    """Of pictures, whose network is trained in float32, the words; of a figure, that there is one."""
    pytest.importorskip("sklearn")
    if name == "table":
        pytest.importorskip("pandas")
    book = notebooks.read(name)
    assert book["nbformat"] == 4
    stored = [cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code"]
    printed = [outputs for _, outputs in notebooks.run(book)]
    assert [_kinds(outputs) for outputs in stored] == [_kinds(outputs) for outputs in printed]
    shown, now = (_text([output for outputs in cells for output in outputs]) for cells in (stored, printed))
    assert pages.same(shown, now, exactly=name == "table")
    assert "nan" not in now
    assert "Posterior: " in now
    kinds = {kind for outputs in stored for kind in _kinds(outputs)}
    assert kinds >= {"stream", "text/html"} | ({"image/png"} if name == "pictures" else set())


def _kinds(outputs: list[dict[str, Any]]) -> list[str]:
    return [kind for output in outputs for kind in output.get("data", {output["output_type"]: None})]


def _text(outputs: list[dict[str, Any]]) -> str:
    return "\n".join("".join(output.get("text") or output["data"]["text/plain"]) for output in outputs)
