"""Commands that several processes share write what one process writes: real torchrun, gloo."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import CLASSES, Workspace, said
from processes import torchrun

ERRBAR = ["-m", "errbar"]
# Weights from a file: processes that train for themselves may round differently.
MODEL = ["--model", "tiny_net:untrained", "--weights", "weights.pt"]
PREDICT = ["predict", "posterior.safetensors", "data.npz", *MODEL, "--batch-size", "7", "--risk", "0.05"]
WORLDS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]

# What a rank reads may depend on its number; `tiny_net` is imported by all of them.
PARTS = """
import os
import signal
import time

import torch
from tiny_net import dataset
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def whole():
    x, y = dataset().tensors
    return list(zip(x.split([5, 1, 40, 7, 30, 37]), y.split([5, 1, 40, 7, 30, 37])))


def stream():
    return iter(whole())


def own():
    parts = whole()
    return parts[len(parts) * RANK // WORLD : len(parts) * (RANK + 1) // WORLD]


def changing():
    return [batch if number == 0 else (batch[0] + RANK, batch[1]) for number, batch in enumerate(whole())]


def last_alone():
    return whole() if RANK < 2 else whole()[1:]


def sampled():
    data = dataset()
    return DataLoader(data, batch_size=9, sampler=DistributedSampler(data, WORLD, RANK, shuffle=False))


def shuffled():
    return DataLoader(dataset(), batch_size=9, shuffle=True, generator=torch.Generator().manual_seed(3))


def few():
    return torch.utils.data.Subset(dataset(), range(2))


class Failing(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        if index == 110:
            self.fail()
        return dataset()[index]


class Broken(Failing):
    def fail(self):
        raise FileNotFoundError("picture 110 is not there")


class Dying(Failing):
    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


def broken():
    return Broken()


def dying():
    return Dying()
"""


@pytest.fixture
def files(workspace: Workspace) -> Workspace:
    if not Path("posterior.safetensors").exists():
        names = ["--class-names", ",".join(CLASSES)]
        torch.save(workspace.model.state_dict(), "weights.pt")
        fit = ["fit", "tiny_net:untrained", "data.npz", *MODEL[2:], "--last-layers", "1", "-o", "posterior.safetensors"]
        said(*fit, *names)
        Path("parts.py").write_text(PARTS)
    return workspace


def facts_of(job: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the one rank that speaks says."""
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("\n") == 1
    facts: dict[str, Any] = json.loads(job.stdout)
    return facts


def predict(data: str, output: Path, *more: str) -> list[str]:
    return ["predict", "posterior.safetensors", data, *MODEL, "-o", str(output), *more]


def timeless(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in ("seconds", "output")}


# --------------------------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("world", WORLDS)
def test_several_processes_write_the_file_of_one(files: Workspace, tmp_path: Path, world: int) -> None:
    alone, together = tmp_path / "alone.csv", tmp_path / "together.csv"
    expected = said(*PREDICT, "-o", str(alone))
    facts = facts_of(torchrun(world, *ERRBAR, *PREDICT, "-o", str(together), "--json"))
    assert timeless(facts) == timeless(expected)
    assert facts["inputs"] == len(files.test[0])
    assert together.read_bytes() == alone.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"alone.csv", "together.csv"}


@pytest.mark.parametrize("ending", ["npz", pytest.param("jsonl", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "data",
    [
        "stream",
        pytest.param("whole", marks=pytest.mark.slow),
        pytest.param("own", marks=pytest.mark.slow),
        pytest.param("shuffled", marks=pytest.mark.slow),
        pytest.param("few", marks=pytest.mark.slow),
    ],
)
def test_data_of_a_callable_come_in_their_order(files: Workspace, tmp_path: Path, data: str, ending: str) -> None:
    """Three processes: a stream that all read, parts of their own, a shuffled loader, fewer batches than ranks."""
    alone, together = tmp_path / f"alone.{ending}", tmp_path / f"together.{ending}"
    said(*predict(f"parts:{data}", alone, "--covariance"))
    facts = facts_of(torchrun(3, *ERRBAR, *predict(f"parts:{data}", together, "--covariance", "--json")))
    assert facts["inputs"] == (2 if data == "few" else 120)
    assert all("not calibrated" in notice for notice in facts["notices"])
    assert together.read_bytes() == alone.read_bytes()


@pytest.mark.slow
def test_the_parts_of_distributed_samplers_are_put_in_the_order_of_the_data(files: Workspace, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone.npz", tmp_path / "together.npz"
    said(*predict("tiny_net:dataset", alone))
    facts_of(torchrun(2, *ERRBAR, *predict("parts:sampled", together, "--json")))
    first, second = np.load(alone), np.load(together)
    assert second["input"].tolist() == list(range(120))
    np.testing.assert_allclose(second["pmf"], first["pmf"], rtol=1e-9)


def test_several_processes_evaluate_as_one(files: Workspace) -> None:
    command = ["evaluate", "posterior.safetensors", "data.npz", *MODEL, "--batch-size", "7"]
    facts = facts_of(torchrun(2, *ERRBAR, *command, "--json"))
    assert timeless(facts) == timeless(said(*command))


def test_several_processes_rank_outliers_as_one(files: Workspace, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone.csv", tmp_path / "together.csv"
    command = ["outliers", "posterior.safetensors", "data.npz", *MODEL, "--batch-size", "7"]
    expected = said(*command, "-o", str(alone))
    facts = facts_of(torchrun(2, *ERRBAR, *command, "-o", str(together), "--json"))
    assert timeless(facts) == timeless(expected)
    assert together.read_bytes() == alone.read_bytes()


# --------------------------------------------------------------------------------------------------------- mistakes


def test_a_rank_that_dies_leaves_the_file_that_was_there(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("what was there\n")
    job = torchrun(2, *ERRBAR, *predict("parts:dying", output, "--force"))
    assert job.returncode != 0
    assert output.read_text() == "what was there\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("parts:broken", "Rank 1 failed with FileNotFoundError: picture 110 is not there"),
        pytest.param(
            "parts:changing", "All ranks read the same first batch, and then different ones", marks=pytest.mark.slow
        ),
        pytest.param("tiny_net:empty", "The data tiny_net:empty are empty", marks=pytest.mark.slow),
    ],
)
def test_a_mistake_on_one_rank_is_told_once_and_leaves_the_file(
    files: Workspace, tmp_path: Path, data: str, sentence: str
) -> None:
    output = tmp_path / "out.csv"
    output.write_text("what was there\n")
    job = torchrun(2, *ERRBAR, *predict(data, output, "--force"))
    assert job.returncode == 1
    assert job.stderr.count(f"errbar: {sentence}") == 1, job.stderr
    assert job.stdout == ""
    assert output.read_text() == "what was there\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


@pytest.mark.slow
def test_data_that_are_the_same_on_some_ranks_are_refused(files: Workspace, tmp_path: Path) -> None:
    job = torchrun(3, *ERRBAR, *predict("parts:last_alone", tmp_path / "out.csv"))
    assert job.returncode == 1
    assert job.stderr.count("errbar: Some ranks read the same first batch, and others another one") == 1


@pytest.mark.slow
def test_a_page_is_made_by_one_process(files: Workspace, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ["evaluate", "posterior.safetensors", "data.npz", *MODEL, "--report", str(page)]
    job = torchrun(2, *ERRBAR, *command)
    assert job.returncode == 1
    assert job.stderr.count("errbar: errbar evaluate --report was started 2 times by torchrun; expected one") == 1
    assert not page.exists()


@pytest.mark.slow
def test_an_output_that_exists_is_refused_before_anything_is_computed(files: Workspace, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    output.write_text("what was there\n")
    job = torchrun(2, *ERRBAR, *predict("data.npz", output))
    assert job.returncode == 1
    assert job.stderr.count("exists already; expected a new name, or --force to replace it") == 1
