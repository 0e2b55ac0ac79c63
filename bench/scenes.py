"""Segmentation: MNIST digits pasted into larger pictures, and patches of what the network has not seen.

    python bench/scenes.py --data DIR [--seed 0] [--rate] [-o bench/results/scenes.json] [--picture FILE]
    python bench/scenes.py --table [-o bench/results/scenes.json]

A fully convolutional network is trained on made scenes of real digits: 3 to 5 digits at random places on a noisy
background, each pixel labelled with its digit or as background (11 classes). Fixed before the first run: 1,500 scenes
of 64 × 64 for training, 300 to calibrate, 300 to report, seeds 0 to 2; posteriors of the last layer (exact) and of the
last layer with all vectors (drawn labels), prior 1, T and T_c by the NLL of 10,000 held-out pixels, against temperature
scaling by the same pixels. Digits of the training set make the training scenes; those of the two others are from the
two halves of the test set. NLL and ECE are those of all pixels, intervals are over scenes. Foreign: one patch of KMNIST
or Fashion-MNIST in each of 100 scenes; AUROC of a score between pixels of the patch and pixels of digits, both without
background.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import errbar
from errbar import metrics
from errbar.experiments.datasets import read_fashion_mnist, read_kmnist, read_mnist
from errbar.experiments.evaluation import paired

_SIZE, _PATCH, _INK = 64, 20, 0.4
_SCENES = {"train": 1500, "held out": 300, "report": 300}
_EPOCHS, _BATCH = 6, 25
_SCORES = ("entropy", "mutual_information")


def network() -> nn.Module:
    """A small fully convolutional network: 11 logits for each pixel, by what it sees of 35 × 35 pixels."""
    layers: list[nn.Module] = []
    width = 1
    for step, channels in enumerate((16, 24, 32, 32, 32)):
        spread = (1, 2, 4, 8, 2)[step]
        layers += [
            nn.Conv2d(width, channels, 3, padding=spread, dilation=spread, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        ]
        width = channels
    return nn.Sequential(*layers, nn.Conv2d(width, 11, 1))


def scenes(
    digits: Tensor, labels: Tensor, count: int, seed: int, foreign: Tensor | None = None, size: int = _SIZE
) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (N, 1, size, size), labels of pixels, and which pixels are of a foreign patch."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator)

    small = F.interpolate(digits[:, None], size=(_PATCH, _PATCH), mode="bilinear", antialias=True)[:, 0]
    strange = None
    if foreign is not None:
        strange = F.interpolate(foreign[:, None], size=(_PATCH, _PATCH), mode="bilinear", antialias=True)[:, 0]
    pictures = 0.15 * torch.rand(count, size, size, generator=generator)
    truth = torch.zeros(count, size, size, dtype=torch.long)
    is_foreign = torch.zeros(count, size, size, dtype=torch.bool)
    cells = size // _PATCH
    for n in range(count):
        places = torch.randperm(cells**2, generator=generator)[: 3 + int(drawn(3))]
        for index, place in enumerate(places.tolist()):
            room = size // cells - _PATCH + 1
            top, left = (cell * (size // cells) + int(drawn(max(1, room))) for cell in divmod(place, cells))
            window = (n, slice(top, top + _PATCH), slice(left, left + _PATCH))
            chosen = int(drawn(len(small)))
            patch = small[chosen]
            if strange is not None and index == 0:
                patch = strange[int(drawn(len(strange)))]
                is_foreign[window] = patch > _INK
            else:
                truth[window] = torch.where(patch > _INK, labels[chosen] + 1, 0)
            pictures[window] = torch.maximum(pictures[window], patch)
    return pictures[:, None], truth, is_foreign


def trained(x: Tensor, y: Tensor, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = network().to(x.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, weight_decay=1e-5)
    steps = _EPOCHS * (len(x) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 8e-3, total_steps=steps)
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(x)).to(x.device).split(_BATCH)[: len(x) // _BATCH]:
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def study(data: Path, seed: int, device: torch.device, picture: Path | None) -> dict[str, Any]:
    mnist = read_mnist(data / "mnist")
    half = len(mnist.test) // 2
    parts = {
        "train": mnist.train,
        "held out": mnist.test.take(torch.arange(half)),
        "report": mnist.test.take(torch.arange(half, 2 * half)),
    }
    made = {
        name: scenes(part.pixels()[:, 0], part.y, _SCENES[name], 10 * seed + index)
        for index, (name, part) in enumerate(parts.items())
    }
    on_device = {name: (x.to(device), y.to(device)) for name, (x, y, _) in made.items()}
    begin = time.perf_counter()
    model = trained(*on_device["train"], seed)
    result: dict[str, Any] = {"seed": seed, "training_seconds": time.perf_counter() - begin, "methods": {}}
    batches = {name: list(zip(x.split(_BATCH), y.split(_BATCH), strict=True)) for name, (x, y) in on_device.items()}
    prior = errbar.Prior(1.0)
    last = errbar.fit(model, batches["train"], last_layers=1, outputs="positions", prior=prior)
    with_vectors = errbar.fit(
        model, batches["train"], parameters="vectors", outputs="positions", fisher="sampled", prior=prior
    )
    plain = last.with_calibration(covariance_scale=0.0)
    methods = {
        "softmax": plain,
        "temperature scaling": errbar.calibrate(plain, batches["held out"], fit=("temperature",)),
        "last layer": errbar.calibrate(last, batches["held out"]),
        "last layer and vectors, drawn labels": errbar.calibrate(with_vectors, batches["held out"]),
    }
    sources = {"KMNIST": read_kmnist(data / "kmnist"), "Fashion-MNIST": read_fashion_mnist(data / "fashion_mnist")}
    report = parts["report"]
    foreign = {
        name: scenes(report.pixels()[:, 0], report.y, 100, 1000 + seed, images.pixels()[:, 0])
        for name, images in sources.items()
    }
    losses: dict[str, Tensor] = {}
    for name, posterior in methods.items():
        scores: dict[str, Any] = {"T": posterior.temperature, "T_c": posterior.covariance_scale}
        pmfs, each = [], []
        for x, y in batches["report"]:
            pmf = posterior.predict(x, 100).pmf.cpu().double()
            pmfs.append(pmf)
            chosen = pmf.gather(-1, y.cpu()[..., None])[..., 0]
            each.append(-chosen.clamp_min(1e-300).log().flatten(1).mean(1))
        truth = made["report"][1]
        pmf = torch.cat(pmfs)
        losses[name] = torch.cat(each)
        scores |= {"accuracy": metrics.accuracy(pmf, truth), "NLL": metrics.nll(pmf, truth)}
        scores |= {"ECE": metrics.ece(pmf, truth), "Brier": metrics.brier(pmf, truth)}
        for source, (x, y, strange) in foreign.items():
            found = [posterior.predict(part.to(device), 100) for part in x.split(_BATCH)]
            ink = strange | (y > 0)
            for score in _SCORES:
                values = torch.cat([getattr(one, score).cpu() for one in found])[ink]
                if not (score == "mutual_information" and posterior.covariance_scale == 0):
                    scores[f"AUROC {source}, {score}"] = metrics.auroc(values, strange[ink])
        result["methods"][name] = scores
    against = losses["temperature scaling"]
    result["paired"] = {}
    for name in methods:
        difference = losses[name] - against
        error = float(difference.std() / len(difference) ** 0.5)
        mean = float(difference.mean())
        result["paired"][name] = [mean, mean - 1.96 * error, mean + 1.96 * error]
    if picture is not None:
        x = foreign["KMNIST"][0][:1].to(device)
        names = ["background", *map(str, range(10))]
        shown = methods["last layer and vectors, drawn labels"].predict(x, 200)
        figure = errbar.plots.segmentation(x[0].cpu(), shown, classes=names)
        figure.savefig(picture, dpi=150)
    return result


def rate(data: Path, device: torch.device) -> dict[str, float]:
    """Pictures of 128 × 128 per second, of a network that was not trained: what it says takes as long."""
    digits = read_mnist(data / "mnist").test
    x, y, _ = scenes(digits.pixels()[:, 0], digits.y, 16, 5, size=128)
    torch.manual_seed(0)
    model = network().to(device).eval()
    batch = [(x.to(device), y.to(device))]
    rates = {}
    for name, options in {
        "last layer": {"last_layers": 1},
        "last layer and vectors": {"parameters": "vectors", "fisher": "sampled"},
    }.items():
        begin = time.perf_counter()
        posterior = errbar.fit(model, batch, outputs="positions", **options)  # type: ignore[arg-type]
        rates[f"fit, {name}"] = len(x) / (time.perf_counter() - begin)
        few = x[:4].to(device)
        posterior.predict(few[:1], 100)
        begin = time.perf_counter()
        std = posterior.predict(few, 100).std
        rates[f"predict, 100 draws, pmf and std, {name}"] = len(std) / (time.perf_counter() - begin)
    return rates


def table(results: dict[str, Any]) -> str:
    """Means over the seeds in Markdown, with Student's intervals; the differences of a single seed are over scenes."""
    runs = list(results["runs"].values())
    columns = {"NLL": 5, "ECE": 5, **{f"AUROC {s}, {by}": 3 for s in ("KMNIST", "Fashion-MNIST") for by in _SCORES}}
    names = [name.replace("AUROC ", "").replace("_", " ") for name in columns]
    rows = [["", *names[:2], "NLL − temperature scaling", *names[2:]]]
    for method in runs[0]["methods"]:
        scores = [run["methods"][method] for run in runs]
        cells = {
            name: _interval([one[name] for one in scores], digits) if name in scores[0] else "–"
            for name, digits in columns.items()
        }
        difference = "–"
        if method != "temperature scaling":
            mean, lower, upper = runs[0]["paired"][method]
            many = [run["paired"][method][0] for run in runs]
            difference = f"{mean:+.6f} [{lower:+.6f}, {upper:+.6f}]" if len(runs) == 1 else _interval(many, 6)
        values = list(cells.values())
        rows.append([method, *values[:2], difference, *values[2:]])
    rows.insert(1, ["---", *["---:"] * (len(names) + 1)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _interval(values: list[float], digits: int) -> str:
    found = paired(values, [0.0] * len(values))
    if found["interval"] is None:
        return f"{found['mean']:.{digits}f}"
    return f"{found['mean']:.{digits}f} ± {found['interval'][1] - found['mean']:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rate", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("bench/results/scenes.json"))
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {"runs": {}}
    if options.table:
        print(table(results))
        return
    if options.data is None:
        parser.error("expected --data, the folder of the data sets")
    if options.rate:
        found = rate(options.data, torch.device(options.device))
        results.setdefault("pictures_per_second", {})[options.device] = found
        print(json.dumps(found, indent=1))
    for seed in options.seed or ([] if options.rate else [0, 1, 2]):
        result = study(options.data, seed, torch.device(options.device), options.picture if seed == 0 else None)
        results["runs"][str(seed)] = result
        print(json.dumps(result, indent=1), flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
