"""The examples run, and say what they should."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


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
