"""Exported graphs against `posterior.predict`: bytes, seconds to export, and the latency of one input and of many.

One thread for all. "Python" computes the outputs of the file: PMF, standard deviations, P^f, logits, P^g and one risk.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from common import PRIOR, alternate, features, head, in_batches, save, show
from torch import Tensor

import errbar

SAMPLES = 1000
THRESHOLD = 0.05
BATCHES = (1, 64, 512)
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "100→40→10, dense": ([100, 40, 10], {"last_layers": 2}),
    "100→40→10, kron": ([100, 40, 10], {"last_layers": 2, "structure": "kron"}),
    "512→10, dense": ([512, 10], {"last_layers": 1}),
    "128→100, eta": ([128, 100], {"last_layers": 1, "fisher": "eta"}),
}


def everything(posterior: errbar.Posterior, x: Tensor) -> tuple[Tensor, ...]:
    gaussian = posterior.unrounded_logits(x)
    prediction = gaussian.predict(SAMPLES)
    rounded = gaussian.rounded()
    return (
        prediction.pmf,
        prediction.std,
        prediction.covariance,
        rounded.mean,
        rounded.covariance,
        prediction.risk(THRESHOLD),
    )


def largest_difference(found: list[Any], truth: tuple[Tensor, ...]) -> float:
    """Over all outputs except the risk, a step function, relative to the largest number of each (at least 1)."""
    pairs = list(zip(found, truth, strict=True))[:-1]
    return max(float((torch.as_tensor(a) - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in pairs)


def measured(name: str, widths: list[int], options: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    x, y = features(2000, widths[0], widths[-1])
    posterior = errbar.fit(head(widths), in_batches(x, y, 500), prior=errbar.Prior(PRIOR), **options)
    posterior = posterior.with_calibration(temperature=1.2, covariance_scale=0.8)
    posterior.predict(x[:2], SAMPLES)
    seconds: dict[str, float] = {}
    for ending in ("onnx", "pt2"):
        start = time.perf_counter()
        posterior.export(folder / f"it.{ending}", example=x[:2], samples=SAMPLES, risk=THRESHOLD)
        seconds[ending] = time.perf_counter() - start
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "it.onnx"), settings, providers=["CPUExecutionProvider"])
    program = torch.export.load(folder / "it.pt2").module()
    rows = []
    for size in BATCHES:
        part = x[:size]
        given = {"x": part.numpy()}
        gc.collect()
        taken = alternate(
            {
                "Python": lambda part=part: everything(posterior, part),
                "Python, PMF alone": lambda part=part: posterior.predict(part, SAMPLES).pmf,
                "ONNX Runtime": lambda given=given: session.run(None, given),
                "pt2": lambda part=part: program(part),
            }
        )
        rows.append(
            {
                "posterior": name,
                "parameters": posterior.information.n_parameters,
                "onnx MB": (folder / "it.onnx").stat().st_size / 1e6,
                "pt2 MB": (folder / "it.pt2").stat().st_size / 1e6,
                "seconds to export onnx": seconds["onnx"],
                "seconds to export pt2": seconds["pt2"],
                "batch": size,
                **{f"{who}, ms": time["median"] * 1e3 for who, time in taken.items()},
                "largest difference": largest_difference(session.run(None, given), everything(posterior, part)),
            }
        )
    return rows


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (widths, options) in CASES.items():
            rows += measured(name, widths, options, Path(folder))
            show(name, rows[-len(BATCHES) :])
    save("export", rows, samples=SAMPLES, threads=1, onnxruntime=onnxruntime.__version__)


if __name__ == "__main__":
    main()
