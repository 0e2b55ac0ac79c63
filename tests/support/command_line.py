"""A folder with a tiny model and its data, and the command line run in this process; for the tests of commands."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from errbar.cli import main

CLASSES = ("ant", "bee", "cat")

MODULE = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset


def network(seed, hidden=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


def fitted(seed):
    model = network(seed)
    data = np.load("data.npz")
    x, y = torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def trained():
    with torch.random.fork_rng(devices=[]):
        return fitted(0)


def other():
    with torch.random.fork_rng(devices=[]):
        return fitted(1)


def untrained():
    with torch.random.fork_rng(devices=[]):
        return network(5)


def large():
    with torch.random.fork_rng(devices=[]):
        return network(0, hidden=9)


def pictures():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def dataset():
    data = np.load("data.npz")
    return TensorDataset(torch.from_numpy(data["x_train"]), torch.from_numpy(data["y_train"]))


def stream():
    x, y = dataset().tensors
    return ((x[i : i + 50], y[i : i + 50]) for i in range(0, len(x), 50))


def empty():
    return []


def hundredth(row):
    return row / 100


def name(row):
    return "text"


def needs(argument):
    return argument


def breaks():
    raise RuntimeError("no disk in the drive")


number = 3
"""


@dataclass(frozen=True, eq=False)
class Workspace:
    """What is in the folder, for comparison with what the commands say."""

    folder: Path
    model: nn.Module
    other: nn.Module
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def write_parquet(self, arrow: Any, parquet: Any) -> None:
        """The training data as columns of numbers, and labels as names would be: a column of their own."""
        x, y = self.train
        columns = {f"feature {number}": x[:, number].tolist() for number in range(4)}
        parquet.write_table(arrow.table(columns | {"label": y.tolist()}), "columns.parquet", row_group_size=17)


def arrays() -> dict[str, Tensor]:
    """Three overlapping classes in four dimensions."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, count in (("train", 120), ("validation", 90), ("test", 60)):
        y = torch.arange(count) % 3
        noise = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        found[f"x_{name}"], found[f"y_{name}"] = noise + 1.5 * torch.eye(4, dtype=torch.float64)[y], y
    return found


def write_workspace(folder: Path) -> None:
    made = {name: tensor.numpy() for name, tensor in arrays().items()}
    (folder / "tiny_net.py").write_text(MODULE)
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    np.savez(folder / "data.npz", **made)
    np.savez_compressed(folder / "compressed.npz", x=made["x_train"], y=made["y_train"])


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run(*arguments: str) -> Result:
    """`errbar` with these arguments, in this process."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main(arguments)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    return Result(code, out.getvalue(), err.getvalue())


def said(*arguments: str) -> dict[str, Any]:
    """What a command that succeeds says with --json, which is all that it says; but for a posterior not calibrated."""
    result = run(*arguments, "--json")
    other = [line for line in result.err.splitlines() if "This posterior is not calibrated" not in line]
    assert (result.code, other) == (0, []), result
    assert result.out.endswith("}\n")
    assert result.out.count("\n") == 1
    facts: dict[str, Any] = json.loads(result.out)
    return facts
