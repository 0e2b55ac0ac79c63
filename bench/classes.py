"""Cost against the number of classes, in forward passes of the same network: a fit, per sample, and a prediction.

ResNet-20 with a head of M = 10, 100, 1000 and 10,000 classes, `parameters="vectors"`, `fisher="sampled"`, K = 100 draws
of the parameters pushed forward. All parameters but the head are exact blocks. The head, whose parameters grow with M,
is `kron`, which has a factor of M × M; beside it a head that is `diag` and has none. What a call takes apart from its
samples is left out, and so is the factorisation, an eigenvalue decomposition of M × M, which has a column of its own.

    python bench/classes.py [--device cuda] [--tiny] [--fit-only] [--output FILE]

With `--tiny` it runs with few classes and samples, to see that it runs. `--fit-only` leaves out the factorisation of
the largest head and what needs it: on a CPU that alone takes minutes.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import PRIOR, alternate, save, show
from torch import Tensor, nn

import errbar
from errbar._base.speed import timed
from errbar.experiments.resnet import cifar_resnet

CLASSES = (10, 100, 1000, 10_000)
DRAWS = 100
REPETITIONS = 5
# Samples of a batch, and batches of the shorter of two fits.
SIZES = {"cpu": (16, 12), "cuda": (512, 8)}


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    return logits


def measured(
    classes: int, head: str, batches: list[Tensor], repetitions: int, *, fit_only: bool = False
) -> dict[str, Any]:
    """A fit and a prediction in forward passes of a batch, and the seconds of the factorisation."""
    first, device = batches[0], batches[0].device
    torch.manual_seed(0)
    model = cifar_resnet(20, classes).to(device).eval()
    few = len(batches) // 2

    def collected(count: int) -> errbar.Information:
        structure = {"linear": head, "*": "block"}
        return errbar.collect(
            model, batches[:count], parameters="vectors", fisher="sampled", structure=structure, group=False
        )

    information = collected(few)
    runs: dict[str, Callable[[], Any]] = {
        "forward": lambda: forward(model, first),
        "short": lambda: collected(few),
        "long": lambda: collected(2 * few),
    }
    if not fit_only:
        posterior, factorised = timed(lambda: errbar.condition(information, errbar.Prior(PRIOR)), device)
        runs["predict"] = lambda: posterior.drawn_logits(first, DRAWS).predict(DRAWS).std
        runs["P^g"] = lambda: posterior.predict(first, DRAWS).std if classes == CLASSES[0] else None
    found = alternate(runs, repetitions)
    seconds = {name: times["median"] for name, times in found.items()}
    row: dict[str, Any] = {
        "classes": classes,
        "head": head,
        "n": information.n_parameters,
        "forward, ms per input": 1e3 * seconds["forward"] / len(first),
        "fit, passes per sample": (seconds["long"] - seconds["short"]) / few / seconds["forward"],
        "M x M, MiB": 8 * classes**2 / 2**20 if head == "kron" else 0.0,
    }
    if fit_only:
        return row
    row |= {"predict, passes per input": seconds["predict"] / seconds["forward"], "factorise, s": factorised}
    if classes == CLASSES[0]:
        # What `predict` takes by itself where there are few classes: a backward pass for each.
        row["predict by P^g, passes per input"] = seconds["P^g"] / seconds["forward"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--classes", type=int, nargs="+", default=CLASSES, help="these numbers alone, into --output")
    parser.add_argument("--fit-only", action="store_true", help="do not factorise the largest head")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, help="in place of bench/results/classes.json, or classes-gpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    size, few = (4, 1) if options.tiny else SIZES[options.device]
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(2 * few * size, 3, 32, 32, generator=generator).to(options.device)
    batches = list(pictures.split(size))
    measured(2, "kron", batches[:2], 1)  # imports, and what is loaded once
    rows: list[dict[str, Any]] = []
    for classes in (10, 30) if options.tiny else options.classes:
        # The largest takes a minute for a round.
        is_largest = classes == CLASSES[-1]
        repetitions = 1 if options.tiny or is_largest else options.repetitions
        some = batches[: max(2, len(batches) // 3)] if is_largest else batches
        for head in ("kron", "diag"):
            fit_only = options.fit_only and is_largest and head == "kron"
            rows.append(measured(classes, head, some, repetitions, fit_only=fit_only))
            show(f"Forward passes of a batch of {size} on {options.device}, K = {DRAWS}", rows[-1:])
    if options.output or not (options.tiny or tuple(options.classes) != CLASSES):
        name = "classes" if options.device == "cpu" else "classes-gpu"
        save(name, rows, batch=size, draws=DRAWS, path=options.output)


if __name__ == "__main__":
    main()
