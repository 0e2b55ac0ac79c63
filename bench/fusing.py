"""Fusion of third-party ResNets on CIFAR-10: pools, `errbar.fuse` and `calibrate_fusion` on three halvings.

The information of 5,000 training pictures, which counts ten times, is enough on a CPU. The logit Gaussians of all test
pictures are kept in a file for each network and shift, so that halvings cost seconds; delete it to compute them again.

    python bench/fusing.py --data FOLDER [--networks resnet20 resnet32] [--parameters vectors] [--prior 10]
        [--shifts] [--cache build/fusing] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import save, show
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import errbar
from errbar._distributions.covariance import FullCovariance
from errbar.experiments.datasets import read_cifar10
from errbar.experiments.fusing import compare_gaussians, gaussians_of, rows_of
from errbar.experiments.pretrained import load_network
from errbar.experiments.shifts import BLUR, CONTRAST

PICTURES, TIMES, HALVINGS, SEVERITY = 5000, 10, 3, 5


def posterior_of(network: nn.Module, parameters: str, prior: float, x: Tensor, y: Tensor) -> errbar.Posterior:
    """N(θ̂, P) of some parameters, from a part of the training data that stands for all of it."""
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:PICTURES]
    batches = [(x[rows], y[rows]) for rows in chosen.split(250)]
    which: dict[str, Any] = {"last_layers": 1} if parameters == "last" else {"parameters": parameters}
    information = errbar.collect(network, batches, fisher="ggn", progress=True, **which)
    return errbar.condition(information * TIMES, errbar.Prior(prior))


def cached(path: Path, posterior: Any, x: Tensor, title: str) -> errbar.LogitGaussian:
    """The logits of all test pictures, computed once."""
    if not path.exists():
        gaussian = gaussians_of(posterior(), x, progress=True, title=title)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"mean": gaussian.mean, "covariance": gaussian.covariance}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    tensors = load_file(path)
    return errbar.LogitGaussian(tensors["mean"], FullCovariance(tensors["covariance"].double()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with cifar10 and pretrained_cifar10")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet32"])
    parser.add_argument("--parameters", default="vectors", choices=["vectors", "last"])
    parser.add_argument("--prior", type=float, default=10.0)
    parser.add_argument("--shifts", action="store_true", help="blur and contrast too")
    parser.add_argument("--cache", type=Path, default=Path("build/fusing"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    split = read_cifar10(arguments.data)
    train, test = ((part.pixels().to(device), part.y) for part in (split.train, split.test))
    shifts = {"none": None, **({"blur": BLUR, "contrast": CONTRAST} if arguments.shifts else {})}
    made: dict[str, errbar.Posterior] = {}

    def gaussian(name: str, shift: str) -> errbar.LogitGaussian:
        def posterior() -> errbar.Posterior:
            if name not in made:
                network = load_network(arguments.data, name, device)
                made[name] = posterior_of(network, arguments.parameters, arguments.prior, train[0], train[1].to(device))
            return made[name]

        how = shifts[shift]
        path = arguments.cache / f"{name}-{arguments.parameters}-{arguments.prior:g}-{shift}.safetensors"
        pictures = test[0] if how is None or path.exists() else how.apply(test[0], SEVERITY)
        return cached(path, posterior, pictures, f"{name}, {shift}")

    logits = {shift: [gaussian(name, shift) for name in arguments.networks] for shift in shifts}
    rows: list[dict[str, Any]] = []
    for seed in range(HALVINGS):
        order = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(seed))
        middle = len(order) // 2
        held_out, rest = order[:middle], order[middle:]
        reports = {
            shift: ([rows_of(each, rest) for each in members], test[1][rest]) for shift, members in logits.items()
        }
        result = compare_gaussians([rows_of(each, held_out) for each in logits["none"]], test[1][held_out], reports)
        chosen = result["calibrate_fusion"]
        print(f"half {seed}: {chosen['chosen']}, {chosen['seconds']:.0f} s, {chosen['numbers']}", flush=True)
        for shift, methods in result["reports"].items():
            rows += [{"half": seed, "shift": shift, "method": name, **scores} for name, scores in methods.items()]
    summary = [
        {
            "shift": shift,
            "method": method,
            **{
                key: statistics.mean(row[key] for row in rows if (row["shift"], row["method"]) == (shift, method))
                for key in ("nll", "difference", "half_width")
            },
        }
        for shift in logits
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    show(f"{' and '.join(arguments.networks)}, mean of {HALVINGS} halvings, difference to the mean of logits", summary)
    save(
        f"fusing-{'-'.join(arguments.networks)}-{arguments.parameters}",
        rows,
        parameters=arguments.parameters,
        prior=arguments.prior,
        summary=summary,
    )


if __name__ == "__main__":
    main()
