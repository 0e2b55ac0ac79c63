"""CPU seconds, inputs looked at again, and memory of `errbar.acquire` over a large pool.

`python bench/acquire.py [--pool 50000] [--count 100]` writes `results/acquire.json`. One thread; time is that of the
process. The network is 784–100–40–10, trained on 1,000 inputs whose labels come from random contrasts.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import head, save, show
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import errbar
from errbar._deciding.conditioned import Conditioned

TRAINED, INPUTS, CLASSES = 1000, 784, 10
CASES: dict[str, dict[str, Any]] = {
    "last layer": {"last_layers": 1},
    "last two layers": {"last_layers": 2},
    "all, kron": {"parameters": "all", "structure": "kron"},
}


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Sparse positive inputs, and the class of the largest of ten random contrasts."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, INPUTS, generator=generator) * (torch.rand(count, INPUTS, generator=generator) < 0.2)
    contrasts = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    return x, ((x - 0.1) @ contrasts).argmax(1)


def trained() -> nn.Module:
    model = head([INPUTS, 100, 40, CLASSES])
    x, y = pictures(TRAINED, 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return model.eval()


def measured(posterior: errbar.Posterior, pool: TensorDataset, count: int, by: str) -> dict[str, float]:
    """Seconds of the process, and how many gains were computed beside the first of each input."""
    looked_at = 0
    gains = Conditioned.gains

    def counted(self: Conditioned, batch: Any) -> Tensor:
        nonlocal looked_at
        looked_at += len(batch)
        return gains(self, batch)

    Conditioned.gains = counted  # type: ignore[method-assign]
    start = time.process_time()
    errbar.acquire(posterior, pool, count, by=by)
    seconds = time.process_time() - start
    Conditioned.gains = gains  # type: ignore[method-assign]
    again = looked_at - len(pool) if by == "information" else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "looked_at_again": again, "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", type=int, default=50_000)
    parser.add_argument("--count", type=int, default=100)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    model, pool = trained(), TensorDataset(pictures(asked.pool, 2)[0])
    rows: list[dict[str, Any]] = []
    for name, options in CASES.items():
        posterior = errbar.fit(model, [pictures(TRAINED, 1)[0]], prior=errbar.Prior(6.0), **options)
        rules = ("information", "mutual_information", "entropy") if name == "last layer" else ("information",)
        for rule in rules:
            rows.append({"parameters": name, "by": rule, **measured(posterior, pool, asked.count, rule)})
            print(rows[-1], flush=True)
    show(f"{asked.count} of {asked.pool:,} inputs", rows)
    save("acquire", rows, pool=asked.pool, count=asked.count)


if __name__ == "__main__":
    main()
