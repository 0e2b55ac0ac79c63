"""Makes the small files in tests/files that `test_files.py` reads: one for each structure, in the format of today.

Run it once for each new format, `python tests/support/make_format_files.py`, and never again for an old one: that files
of old formats keep loading is what they are for. Weights and data are exact in binary, so every machine makes the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import errbar
from errbar._base.container import FORMAT
from places import FORMAT_FILES

OPTIONS = {
    "dense": {"last_layers": 2},
    "per-class": {"last_layers": 1, "fisher": "eta"},
    "block": {"last_layers": 2, "structure": "block"},
    "kron": {"last_layers": 2, "structure": "kron"},
    "diag": {"last_layers": 2, "structure": "diag"},
    "lowrank": {"last_layers": 2, "structure": "lowrank", "rank": 4},
}
CLASSES = ("yes", "no")


def exact(*shape: int, step: int) -> Tensor:
    """Multiples of 1/8 between −3/4 and 3/4."""
    count = int(torch.Size(shape).numel())
    return ((torch.arange(count) * step % 13 - 6).double() / 8).reshape(shape)


def model() -> nn.Module:
    network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double().eval()
    with torch.no_grad():
        for step, parameter in enumerate(network.parameters(), 3):
            parameter.copy_(exact(*parameter.shape, step=step))
    return network


def data() -> list[tuple[Tensor, Tensor]]:
    return [(exact(10, 2, step=5), torch.arange(10) % 2), (exact(6, 2, step=11), torch.arange(6) % 2)]


def posterior(name: str) -> errbar.Posterior:
    made = errbar.fit(model(), data(), prior=errbar.Prior(0.5), **OPTIONS[name])  # type: ignore[arg-type]
    return made.with_calibration(temperature=1.25, covariance_scale=0.75)


def main() -> None:
    FORMAT_FILES.mkdir(exist_ok=True)
    for name in OPTIONS:
        posterior(name).save(FORMAT_FILES / f"format-{FORMAT}-{name}.safetensors", factors=True, classes=CLASSES)


if __name__ == "__main__":
    main()
