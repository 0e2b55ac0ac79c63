"""Shared by all benchmarks: problems, alternating timings, the machine, and result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"
PRIOR = 6.0
_LEAST_SECONDS = 0.2


def head(widths: list[int], seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them, from an explicit seed; a last layer alone gets a ReLU before it.

    The features are not negative, so this ReLU changes nothing; laplace-torch needs more than one module.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) / inputs**0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*([nn.ReLU()] if len(widths) == 2 else []), *layers[:-1])


def features(count: int, width: int, classes: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs like the output of a ReLU layer, and labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator).clamp_min(0)
    return x, torch.randint(0, classes, (count,), generator=generator)


def in_batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def alternate(runs: dict[str, Callable[[], Any]], repetitions: int = 5) -> dict[str, dict[str, float]]:
    """Seconds of each run, taken in turn so that a slow spell of the machine affects all: median, minimum, maximum.

    The first round warms up, and finds the calls that are too short to be timed alone: these are repeated many times.
    """
    taken: dict[str, list[float]] = {name: [] for name in runs}
    calls = {name: max(1, min(100, round(_LEAST_SECONDS / _seconds(run, 1)))) for name, run in runs.items()}
    for _ in range(repetitions):
        for name, run in runs.items():
            taken[name].append(_seconds(run, calls[name]))
    return {
        name: {"median": statistics.median(t), "least": min(t), "most": max(t), "repetitions": len(t)}
        for name, t in taken.items()
    }


def _seconds(run: Callable[[], Any], calls: int) -> float:
    """Mean seconds per call."""
    start = now()
    for _ in range(calls):
        run()
    return (now() - start) / calls


def now() -> float:
    """Seconds, when a GPU has finished; with one thread those of this process, which others hardly disturb."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def machine() -> dict[str, Any]:
    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    names = ("errbar", "torch", "numpy", "laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl")
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in names},
    }


def save(name: str, rows: list[dict[str, Any]], *, path: Path | None = None, **about: Any) -> None:
    """Write bench/results/NAME.json, or another file."""
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), **about, "rows": rows}
    (path or RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A plain table on standard output."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    print("  " + "  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)))
    for line in cells:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    sys.stdout.flush()


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
