"""Whole convolutional networks and norm layers: time per sample of the fit and per input, on a CPU or a GPU.

ResNets for CIFAR-10 with random weights and pictures, on which the time does not depend. On a CPU also
laplace-torch, with each of its backends that can differentiate such a network.

    python bench/networks.py [--device cuda]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import PRIOR, alternate, in_batches, save, show
from torch import Tensor, nn

import errbar
from errbar.experiments.resnet import cifar_resnet

# Samples per fit and per batch.
SIZES = {"cpu": (64, 64), "cuda": (4096, 1024)}
# laplace-torch gets few, because it takes up to a second per sample.
FEW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    device = parser.parse_args().device
    count, size = SIZES[device]
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for depth in (20, 32) if device == "cuda" else (20,):
        model = cifar_resnet(depth).eval().to(device)
        x, y = torch.rand(count, 3, 32, 32, device=device), torch.randint(0, 10, (count,), device=device)
        norms = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
        asked: dict[str, Any] = {"dense": ["linear", *norms], "kron": "all", "diag": "all", "lowrank": "all"}
        rows += [
            {"network": f"ResNet-{depth}", **timed(model, x, y, size, structure, parameters)}
            for structure, parameters in asked.items()
        ]
    show("Whole networks, ms per sample and ms per input", rows)
    if device == "cuda":
        save("networks-gpu", rows, samples=count, batch=size)
        return
    peers = [row for structure in ("kron", "diag") for row in of_the_peer(model, x[:FEW], y[:FEW], structure)]
    show("laplace-torch on the same network, ms per sample and ms per input", peers)
    save("networks", rows, samples=count, batch=size, peers=peers)


def timed(model: nn.Module, x: Tensor, y: Tensor, size: int, structure: Any, parameters: Any) -> dict[str, Any]:
    batches = in_batches(x, y, size)

    def fit() -> errbar.Posterior:
        return errbar.fit(model, batches, parameters=parameters, structure=structure, prior=errbar.Prior(PRIOR))

    posterior = fit()
    found = alternate({"fit": fit, "predict": lambda: posterior.predict(x[:size]).pmf}, repetitions=3)
    return {
        "structure": structure,
        "n": posterior.information.n_parameters,
        "fit, ms": 1e3 * found["fit"]["median"] / len(x),
        "predict, ms": 1e3 * found["predict"]["median"] / min(size, len(x)),
    }


def of_the_peer(model: nn.Module, x: Tensor, y: Tensor, structure: str) -> list[dict[str, Any]]:
    """All backends, all parameters, one batch, and how far its PMFs are from ours with the same draws."""
    import peers

    posterior = errbar.fit(model, [(x, y)], parameters="all", structure=structure, prior=errbar.Prior(PRIOR))
    found = []
    for name, backend in peers.backends().items():
        row: dict[str, Any] = {"structure": structure, "backend": name}
        try:
            start = time.perf_counter()
            peer = peers.fitted(model, x, y, subset="all", structure=structure, backend=backend, batch=len(x))
            row["fit, ms"] = 1e3 * (time.perf_counter() - start) / len(x)
            start = time.perf_counter()
            peers.predict(peer, x, len(x), 1000)
            row["predict, ms"] = 1e3 * (time.perf_counter() - start) / len(x)
            mean, covariance = (part.detach() for part in peer._glm_predictive_distribution(x))
            theirs = errbar.LogitGaussian(mean, covariance).predict(1000).pmf
            ours = posterior.logits(x)
            ours = errbar.LogitGaussian(ours.mean, ours.covariance).predict(1000).pmf
            row["difference of PMFs"] = float((ours - theirs).abs().max())
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:100]
        found.append(row)
    return found


if __name__ == "__main__":
    main()
