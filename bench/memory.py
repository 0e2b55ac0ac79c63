"""The bytes and seconds that `errbar.plan` predicts, against measurements: each case in a separate process.

A case is first warmed up on a tiny problem, so that torch's one-off setup is not counted; then the peak of the
process is reset (/proc/self/clear_refs) and read after the fit and after a prediction. On a GPU the peak is that of
torch's allocator. `--case NAME` prints the JSON of one case; without it all are run and written to results/memory.json.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import PRIOR, features, head, in_batches, save, show
from torch import Tensor, nn

import errbar
from errbar.experiments.resnet import cifar_resnet

SAMPLES = 1000


@dataclass(frozen=True)
class Case:
    """A model, the shape of one input, and the request."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    options: dict[str, Any]
    count: int = 2048
    batch: int = 512
    warm: dict[str, Any] = field(default_factory=dict)


def layered(widths: list[int], count: int = 2048, **options: Any) -> Case:
    return Case(lambda: head(widths), (widths[0],), widths[-1], {"last_layers": len(widths) - 1, **options}, count)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))


def convolutional() -> nn.Module:
    """Held out: none of the plan's constants was chosen with this network in view."""
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10))


def whole(**options: Any) -> Case:
    return Case(convolutional, (3, 32, 32), 10, {"parameters": "all", **options}, 256, 128)


def resnet(**options: Any) -> Case:
    return Case(lambda: cifar_resnet(20), (3, 32, 32), 10, {"parameters": "all", **options}, 128, 64)


CASES = {
    "dense 100-40-10": layered([100, 40, 10]),
    "dense 190-40-10": layered([190, 40, 10]),
    "dense 512-10": layered([512, 10]),
    "dense 512-10 float64": layered([512, 10], precision="float64"),
    "per-class 128-1000 eta": layered([128, 1000], fisher="eta"),
    "kron 512-10": layered([512, 10], structure="kron"),
    "kron 2048-1000": layered([2048, 1000], structure="kron"),
    "kron resnet20": resnet(structure="kron"),
    "diag resnet20": resnet(structure="diag"),
    "lowrank resnet20 k=50": resnet(structure="lowrank", rank=50),
    "dense generic": Case(normed, (100,), 10, {"last_layers": 3}, 512, 256),
    "block 150-40-40-10": layered([150, 40, 40, 10], structure="block"),
    "dense 70-50-30": layered([70, 50, 30]),
    "kron convolutional": whole(structure="kron"),
    "diag convolutional": whole(structure="diag"),
    "lowrank convolutional k=100": whole(structure="lowrank", rank=100),
}


def measured(case: Case, device: torch.device) -> dict[str, float]:
    torch.manual_seed(0)
    meter: Any = CudaMeter(device) if device.type == "cuda" else ProcessMeter()
    _warm_up(case, device)
    model = case.model().to(device).eval()
    x, y = _data(case)
    x, y = x.to(device), y.to(device)
    batches, inputs = in_batches(x, y, case.batch), x[: case.batch]
    before = meter.start()
    start = _now(device)
    information = errbar.collect(model, batches, **case.options)
    collected = _now(device)
    posterior = errbar.condition(information, errbar.Prior(PRIOR))
    conditioned = _now(device)
    fit, held = meter.peak() - before, meter.held() - before
    meter.start()
    first = _now(device)
    posterior.predict(inputs, samples=SAMPLES)
    first = _now(device) - first
    predict = meter.peak() - before
    times = []
    for _ in range(3):
        again = _now(device)
        posterior.predict(inputs, samples=SAMPLES)
        times.append(_now(device) - again)
    # Four passes over the samples separate the fixed cost from the cost per sample.
    again = _now(device)
    errbar.collect(model, batches * 4, **case.options)
    each = max(0.0, _now(device) - again - (collected - start)) / (3 * case.count)
    once = max(0.0, collected - start - case.count * each)
    return {
        "posterior bytes": held,
        "fit bytes": fit,
        "predict bytes": predict,
        "fit seconds per sample": each,
        "seconds once": once + conditioned - collected + max(0.0, first - min(times)),
        "predict seconds per input": min(times) / case.batch,
    }


def predicted(case: Case, device: torch.device) -> dict[str, float]:
    model, (x, _) = case.model().to(device).eval(), _data(case)
    given = {"structure": "dense", **case.options}
    (option,) = errbar.plan(model, x[: case.batch].to(device), samples=SAMPLES, **given).options
    return {
        "posterior bytes": option.posterior_bytes,
        "fit bytes": option.fit_bytes,
        "predict bytes": option.predict_bytes,
        "fit seconds per sample": option.fit_seconds_per_sample,
        "seconds once": option.seconds_once,
        "predict seconds per input": option.predict_seconds_per_input,
    }


def _data(case: Case) -> tuple[Tensor, Tensor]:
    size = int(torch.Size(case.shape).numel())
    x, y = features(case.count, size, case.classes)
    return x.reshape(case.count, *case.shape), y


def _warm_up(case: Case, device: torch.device) -> None:
    """The same calls on a problem of a few kilobytes; and a product, a factorisation and an eigenvalue problem."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(device).eval()
    x = torch.randn(8, 3, 4, 4, device=device)
    options = {k: v for k, v in case.options.items() if k in ("fisher", "structure", "rank", "precision")}
    for asked in ({"parameters": "all"}, {"last_layers": 1}):
        errbar.fit(model, [(x, torch.arange(8) % 3)], **asked, **options).predict(x)
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(300, 300, dtype=dtype, device=device)
        torch.linalg.eigh(a @ a.T)
        torch.linalg.cholesky_ex(a @ a.T)


def _now(device: torch.device) -> float:
    """With one thread, the time of this process, which other processes do not disturb."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if torch.get_num_threads() == 1 and device.type == "cpu" else time.perf_counter()


class ProcessMeter:
    """Bytes of this process, as Linux reports them."""

    def start(self) -> int:
        """Reset the peak and return what is held now."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return self.held()

    def peak(self) -> int:
        return _status("VmHWM")

    def held(self) -> int:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return _status("VmRSS")


class CudaMeter:
    """Bytes of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self) -> int:
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.held()

    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    def held(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status does not tell {name}; the measurement needs Linux.")


def row(name: str, device: str) -> dict[str, Any]:
    """One case in a separate process."""
    command = [sys.executable, "-W", "ignore", __file__, "--case", name, "--device", device]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if run.returncode:
        raise RuntimeError(f"{name}: {run.stderr}")
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def both(name: str, device: torch.device) -> dict[str, Any]:
    found = {"case": name, "device": device.type, "measured": measured(CASES[name], device)}
    found["predicted"] = predicted(CASES[name], device)
    found["ratio"] = {key: found["predicted"][key] / max(value, 1e-9) for key, value in found["measured"].items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(both(given.case, torch.device(given.device))))
        return
    rows = []
    for name in CASES:
        rows.append(row(name, given.device))
        save("memory", rows, samples=SAMPLES)
    shown = []
    for found in rows:
        line = {"case": found["case"]}
        for key, unit, short in (("fit bytes", 2**20, "fit MiB"), ("predict bytes", 2**20, "predict MiB")):
            line[short] = found["measured"][key] / unit
            line[f"{short} predicted/measured"] = found["ratio"][key]
        for key in ("fit seconds per sample", "seconds once", "predict seconds per input"):
            line[f"{key} ratio"] = found["ratio"][key]
        shown.append(line)
    show("Predicted against measured", shown)


if __name__ == "__main__":
    main()
