"""What the command line says of models whose weights are random, and of posteriors that are not calibrated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command_line import run, write_workspace
from errbar.cli import models

UNCALIBRATED = (
    "This posterior is not calibrated (T = 1 and T_c = 1): its PMFs may be far too flat, and its error bars far "
    "too wide. errbar calibrate fits both to held-out data."
)
RANDOM = """
import torch
from torch import nn

def unseeded():
    return nn.Linear(4, 3).double()

instance = nn.Linear(4, 3).double()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_workspace(tmp_path)
    return tmp_path


def test_weights_that_differ_each_time_are_refused(folder: Path) -> None:
    (folder / "random_net.py").write_text(RANDOM)
    command = ("fit", "random_net:unseeded", "data.npz", "--last-layers", "1", "-o", "out.safetensors")
    result = run(*command)
    assert result.code == 1
    assert result.err == (
        "errbar: The model 'random_net:unseeded' has other weights each time it is made: they are drawn at random, and "
        "nothing was loaded. Give the trained ones with --weights FILE, or let the callable load them.\n"
    )
    assert not Path("out.safetensors").exists()
    from random_net import unseeded  # type: ignore[import-not-found]

    torch.save(unseeded().state_dict(), "weights.pt")
    assert run(*command, "--weights", "weights.pt").code == 0


def test_a_module_that_sets_a_seed_when_it_is_imported_makes_the_same_weights(folder: Path) -> None:
    (folder / "seeded_net.py").write_text(RANDOM.replace("import torch\n", "import torch\ntorch.manual_seed(3)\n", 1))
    with torch.random.fork_rng(devices=[]):
        model = models.reproducible_model_of("seeded_net:unseeded", None, torch.device("cpu"))
    assert sum(value.numel() for value in model.parameters()) == 15


def test_a_posterior_that_is_not_calibrated_is_told_of(folder: Path) -> None:
    fit = ("fit", "tiny_net:trained", "data.npz", "--last-layers", "2", "--prior", "2", "-o", "posterior.safetensors")
    assert run(*fit).code == 0
    model = ("--model", "tiny_net:trained")
    predicted = run("predict", "posterior.safetensors", "data.npz", *model, "-o", "out.csv")
    assert predicted.err.count(f"errbar: note: {UNCALIBRATED}\n") == 1
    evaluated = run("evaluate", "posterior.safetensors", "data.npz", *model, "--json", "--report", "page.html")
    assert json.loads(evaluated.out)["notices"] == [UNCALIBRATED]
    page = Path("page.html").read_text()
    assert "This posterior is not calibrated" in page
    run("calibrate", "posterior.safetensors", "data.npz", *model, "-o", "calibrated.safetensors")
    again = run("evaluate", "calibrated.safetensors", "data.npz", *model, "--json", "--report", "second.html")
    assert json.loads(again.out)["notices"] == []
    assert "not calibrated" not in Path("second.html").read_text()


def test_calibrating_on_the_training_split_is_told_of(folder: Path) -> None:
    fit = ("fit", "tiny_net:trained", "data.npz", "--last-layers", "2", "--prior", "2", "-o", "posterior.safetensors")
    assert run(*fit).code == 0
    command = ("calibrate", "posterior.safetensors", "--model", "tiny_net:trained")
    result = run(*command, "data.npz:train", "-o", "wrong.safetensors")
    assert (
        "About 100% of the held-out samples were in the data of the fit (120 of 120 that were compared)." in result.err
    )
    assert "data of the fit" not in run(*command, "data.npz", "-o", "right.safetensors").err
