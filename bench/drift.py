"""How soon the monitor notices a change, and how often it raises false alarms: digits in random order, then changed.

    python bench/drift.py [--data DIR with MNIST]

The network is trained and calibrated on other digits. In each run the rest is shuffled: a reference, a clean stretch,
then the change. Labels come 50 inputs late.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import save, show
from torch import Tensor

import errbar
from errbar.experiments.datasets import read_mnist
from errbar.experiments.networks import paper_network
from errbar.experiments.shifts import noisy
from errbar.experiments.training import seeded, train
from errbar.experiments.views import rotated

LATE = 50
SAMPLES = 200


@dataclass(frozen=True)
class Sizes:
    train: int
    calibration: int
    reference: int
    clean: int
    changed: int


MNIST = Sizes(train=10_000, calibration=2000, reference=2000, clean=1000, changed=2000)
DIGITS = Sizes(train=700, calibration=300, reference=400, clean=100, changed=297)

Change = Callable[[errbar.Posterior, Tensor, Tensor, torch.Generator], tuple[errbar.Posterior, Tensor, Tensor]]


def turned(degrees: float) -> Change:
    return lambda posterior, x, y, _: (posterior, flat(rotated(pictures(x), degrees)), y)


def grainy(severity: int) -> Change:
    return lambda posterior, x, y, _: (posterior, flat(noisy(pictures(x), severity)), y)


def few_classes(posterior: errbar.Posterior, x: Tensor, y: Tensor, _: torch.Generator) -> Any:
    return posterior, x[y < 5], y[y < 5]


def wrong_labels(share: float) -> Change:
    def change(posterior: errbar.Posterior, x: Tensor, y: Tensor, generator: torch.Generator) -> Any:
        wrong = torch.rand(len(y), generator=generator) < share
        return posterior, x, torch.where(wrong, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)

    return change


def temperature(factor: float) -> Change:
    return lambda posterior, x, y, _: (posterior.with_calibration(temperature=factor * posterior.temperature), x, y)


CHANGES: dict[str, Change] = {
    "none": lambda posterior, x, y, _: (posterior, x, y),
    "turned by 10°": turned(10),
    "turned by 20°": turned(20),
    "turned by 45°": turned(45),
    "noise, severity 1": grainy(1),
    "noise, severity 5": grainy(5),
    "only classes 0–4": few_classes,
    "5 % wrong labels": wrong_labels(0.05),
    "20 % wrong labels": wrong_labels(0.2),
    "temperature × 0.25": temperature(0.25),
    "temperature × 4": temperature(4.0),
}


def pictures(x: Tensor) -> Tensor:
    side = round(x.shape[1] ** 0.5)
    return x.reshape(-1, 1, side, side)


def flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def data(folder: Path | None) -> tuple[Tensor, Tensor, Sizes]:
    if folder is None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        return torch.as_tensor(images).float()[order] / 16, torch.as_tensor(labels).long()[order], DIGITS
    split = read_mnist(folder)
    keep = MNIST.train + MNIST.calibration
    x = torch.cat([split.train.x[:keep], split.test.x]).flatten(1).float() / 255
    return x, torch.cat([split.train.y[:keep], split.test.y]).long(), MNIST


def fitted(x: Tensor, y: Tensor, sizes: Sizes) -> errbar.Posterior:
    with seeded(0, x.device):
        network = paper_network(x.shape[1])
    n, m = sizes.train, sizes.train + sizes.calibration
    settings: dict[str, Any] = {"epochs": 20, "learning_rate": 1e-3, "weight_decay": 1e-4, "batch_size": 64, "seed": 0}
    model = train(network, x[:n], y[:n], **settings)
    posterior = errbar.fit(model, [(x[:n], y[:n])], last_layers=2, prior=errbar.Prior.from_weight_decay(1e-4, n))
    return errbar.calibrate(posterior, [(x[n:m], y[n:m])])


def one_run(posterior: errbar.Posterior, change: Change, x: Tensor, y: Tensor, sizes: Sizes, seed: int) -> list[Any]:
    """The alarms of one stream, with positions counted from the change."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    reference, clean, rest = order.tensor_split((sizes.reference, sizes.reference + sizes.clean))
    monitor = errbar.Monitor(posterior.predict(x[reference], samples=SAMPLES), rate=0.01, seed=seed)
    names = 0
    truth: dict[int, int] = {}
    changed, x_changed, y_changed = change(posterior, x[rest], y[rest], generator)
    parts = [
        (posterior, x[clean], y[clean]),
        (changed, x_changed[: sizes.changed], y_changed[: sizes.changed]),
    ]
    for predictor, inputs, labels in parts:
        for batch, batch_labels in zip(inputs.split(LATE), labels.split(LATE), strict=True):
            if truth:
                monitor.label([*truth], [*truth.values()])
            truth = dict(zip(range(names, names + len(batch)), batch_labels.tolist(), strict=True))
            monitor.observe(predictor.predict(batch, samples=SAMPLES), [*truth])
            names += len(batch)
    monitor.label([*truth], [*truth.values()])
    return [*monitor.alarms]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--runs", type=int, default=20)
    arguments = parser.parse_args()
    x, y, sizes = data(arguments.data)
    posterior = fitted(x, y, sizes)
    held_out = slice(sizes.train + sizes.calibration, None)
    x, y = x[held_out], y[held_out]
    rows: list[dict[str, Any]] = []
    for name, change in CHANGES.items():
        found: dict[str, list[int]] = {test: [] for test in errbar.Monitor(posterior.predict(x[:2])).rates}
        early, first, starts = 0, [], []
        for seed in range(arguments.runs):
            alarms = one_run(posterior, change, x, y, sizes, seed)
            late = [alarm for alarm in alarms if alarm.at > sizes.clean]
            early += len(alarms) > len(late)
            for alarm in late:
                found[alarm.test].append(alarm.at - sizes.clean)
            if late:
                soonest = min(late, key=lambda alarm: alarm.at)
                first.append(soonest.at - sizes.clean)
                starts.append(soonest.since - sizes.clean)
        row: dict[str, Any] = {"change": name, "alarm before": early, "alarm after": len(first)}
        row["delay"] = _median(first)
        row["longest"] = max(first, default="–")
        row["estimated start"] = _median(starts)
        for test, delays in found.items():
            row[test] = f"{len(delays)}: {_median(delays)}" if delays else "–"
        rows.append(row)
    title = (
        f"{arguments.runs} streams of {sizes.clean} digits, then {sizes.changed} changed; reference {sizes.reference}"
    )
    show(title, rows)
    save("drift" if arguments.data else "drift-digits", rows, title=title)


def _median(values: list[int]) -> Any:
    return round(statistics.median(values)) if values else "–"


if __name__ == "__main__":
    main()
