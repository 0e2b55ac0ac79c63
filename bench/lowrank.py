"""The low-rank structure on whole networks: time, memory, what is discarded, and how far that is from exact.

Each case runs in a separate process, so that its peak memory is its own.

    python bench/lowrank.py                    # a network of 11 million parameters alone
    python bench/lowrank.py --data FOLDER      # the folder with cifar10 and pretrained_cifar10: ResNet-20 as well
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import PRIOR, save, show
from torch import Tensor, nn

from errbar._base import linalg
from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._curvature import sketch
from errbar._curvature.fisher import LogitWeights
from errbar._curvature.lowrank import LowRankAccumulator, LowRankFactor, LowRankSum, pulled_back
from errbar._curvature.sketch import FrequentDirections, orthogonalised
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.experiments.datasets import read_cifar10
from errbar.experiments.resnet import Block, load_pretrained, normalise

CPU = torch.device("cpu")


def everything(model: nn.Module) -> tuple[Network, Selection]:
    parameters = dict(model.named_parameters())
    return Network(model), Selection(tuple(parameters), tuple(tuple(p.shape) for p in parameters.values()))


def peak_gib() -> float:
    """The peak of this process alone, where the system reports it; `ru_maxrss` starts at that of the parent process."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(lines[0].split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(model: nn.Module, pictures: Tensor, inputs: Tensor, rank: int) -> dict[str, Any]:
    """Seconds and bytes of collecting, conditioning and predicting for a whole network."""
    network, selection = everything(model)
    before = peak_gib()
    wall, processor = [time.perf_counter()], [time.process_time()]

    def lap() -> None:
        wall.append(time.perf_counter())
        processor.append(time.process_time())

    with plain_execution(CPU):
        total = LowRankAccumulator(network, selection, "ggn", network.dtype, CPU, rank)
        for part in pictures.split(64):
            total.add_batch(network.prepare(Batch((part,)), Checks(CPU)))
        summed = total.finish()
        lap()
        del total
        collect_peak = peak_gib()
        factor = conditioned(summed)
        lap()
        gaussian = factor.gaussian_of_batch(network, selection, network.prepare(Batch((inputs,)), Checks(CPU)))
        lap()
    collect, condition, predict = (after - first for first, after in pairwise(processor))
    return {
        "n": selection.n_parameters,
        "rank": rank,
        "samples": len(pictures),
        "inputs": len(inputs),
        "collect, processor ms per sample": collect / len(pictures) * 1e3,
        "condition, processor s": condition,
        "predict, processor ms per input": predict / len(inputs) * 1e3,
        "wall s (collect, condition, predict)": [after - first for first, after in pairwise(wall)],
        "GiB before": before,
        "GiB at the peak, collect": collect_peak,
        "GiB at the peak, all": peak_gib(),
        "trace": summed.mass,
        "discarded share": summed.discarded_mass / summed.mass,
        "bound": summed.bound,
        "largest eigenvalue": float(summed.rows.double().square().sum(1).max()),
        "contrast variance": float(gaussian.contrast_variance.mean()),
    }


def conditioned(total: LowRankSum, precision: float = PRIOR) -> LowRankFactor:
    return total.condition(torch.full((total.rows.shape[1],), precision, dtype=torch.float64), 0.0)


def contrasts(covariance: Tensor) -> Tensor:
    return linalg.contrast_covariance(covariance).diagonal(dim1=1, dim2=2).mean(1)


def resnet20(weights: Path, pictures: Tensor, inputs: Tensor, rank: int) -> dict[str, Any]:
    row = measured(load_pretrained(weights), pictures, inputs, rank)
    return {"network": "ResNet-20, CIFAR-10, third party", **row}


def eleven_million(samples: int, rank: int) -> dict[str, Any]:
    """ResNet-18 in width and depth, untrained: its cost does not depend on its weights."""
    torch.manual_seed(0)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(inputs, outputs) for inputs, outputs in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)).eval()
    pictures = torch.randn(samples + 2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    row = measured(model, pictures[:samples], pictures[samples:], rank)
    return {"network": "ResNet-18, CIFAR size, untrained", **row}


def accuracy(weights: Path, pictures: Tensor, inputs: Tensor, ranks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Against the exact posterior of the same pictures, computed from their rows while these are few enough to keep."""
    network, selection = everything(load_pretrained(weights))
    with plain_execution(CPU):
        kept = []
        for part in pictures.split(16):
            vectors = LogitWeights(network.logits(Batch((part,))), "ggn").thin_root().mT.float()
            kept.append(pulled_back(network, selection, Batch((part,)), vectors).flatten(0, 1))
        rows = torch.cat(kept)
        del kept
        diagonal = torch.cat([part.double().square().sum(0) for part in rows.split(4096, 1)])
        exact = LowRankSum(rows, diagonal, 0.0, len(rows))
        truth = conditioned(exact).gaussian_of_batch(network, selection, Batch((inputs,))).covariance
        prior = LowRankSum(rows[:1] * 0, diagonal * 0, 0.0, 1)
        nothing = conditioned(prior).gaussian_of_batch(network, selection, Batch((inputs,))).covariance
        found = [_compared("no information: the prior", 0, truth, nothing, 1.0, 0.0)]
        only_diagonal = LowRankSum(rows[:1] * 0, diagonal, 0.0, 1)
        diagonal_only = conditioned(only_diagonal).gaussian_of_batch(network, selection, Batch((inputs,))).covariance
        found.append(_compared("diagonal alone", 0, truth, diagonal_only, 1.0, 0.0))
        for rank in ranks:
            total = _sketched(rows, rank)
            for name, put_back in _corrections(total).items():
                precision = PRIOR + put_back
                factor = LowRankFactor(precision, *orthogonalised(total.rows, precision.rsqrt()))
                covariance = factor.gaussian_of_batch(network, selection, Batch((inputs,))).covariance
                found.append(_compared(name, rank, truth, covariance, total.discarded_mass / total.mass, total.bound))
        chosen = sketch._SHRUNK_SHARE
        for share in (1.0, 0.5, chosen, 0.0):
            sketch._SHRUNK_SHARE = share
            total = _sketched(rows, 100)
            covariance = conditioned(total).gaussian_of_batch(network, selection, Batch((inputs,))).covariance
            lost = total.discarded_mass / total.mass
            found.append(_compared(f"low rank, a/k = {share}", 100, truth, covariance, lost, total.bound))
    return [{"samples": len(pictures), **row} for row in found]


def _sketched(rows: Tensor, rank: int) -> LowRankSum:
    total = FrequentDirections(rows.shape[1], rank, rows.dtype, CPU)
    for part in rows.split(144):
        total.add(part)
    return LowRankSum(total.finish(), total.diagonal, total.bound, rank)


def _corrections(total: LowRankSum) -> dict[str, Tensor]:
    """Ways of putting back what the sketch discarded; errbar uses the first."""
    ones = torch.ones_like(total.discarded)
    return {
        "low rank, diagonal put back": total.discarded,
        "low rank, its mean put back": total.discarded.mean() * ones,
        "low rank, nothing put back": 0 * ones,
        "low rank, half the bound put back": total.bound / 2 * ones,
    }


def _compared(name: str, rank: int, truth: Tensor, found: Tensor, lost: float, bound: float) -> dict[str, Any]:
    ratio = contrasts(found) / contrasts(truth)
    return {
        "approximation": name,
        "rank": rank,
        "discarded share": lost,
        "bound": bound,
        "variance/exact, median": float(ratio.median()),
        "variance/exact, least": float(ratio.min()),
        "variance/exact, most": float(ratio.max()),
        "error of P^g, Frobenius": float(
            ((found - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).mean()
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    data: Path | None = parser.parse_args().data
    threads = torch.get_num_threads()

    def alone(case: Callable[..., Any], *given: Any) -> Any:
        with multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (threads,)) as pool:
            return pool.apply(case, given)

    rows, compared = [], []
    if data is not None:
        weights = data / "pretrained_cifar10" / "resnet20-12fca82f.th"
        split = read_cifar10(data)
        pictures, inputs = normalise(split.train.pixels()[:300]), normalise(split.test.pixels()[:32])
        rows.append(alone(resnet20, weights, pictures, inputs, 100))
        compared = alone(accuracy, weights, pictures[:150], inputs, (10, 30, 100, 300))
    rows.append(alone(eleven_million, 64, 50))
    show("Whole networks, low rank", rows)
    if data is None:
        print("ResNet-20 was left out; name its folder: make bench DATA=FOLDER.")
        return
    show("ResNet-20, all parameters: against the exact posterior", compared)
    save("lowrank", rows, prior=PRIOR, accuracy=compared)


if __name__ == "__main__":
    main()
