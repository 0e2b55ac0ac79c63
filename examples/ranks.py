"""A fit over several processes, with the same calls as in one.

    python examples/ranks.py
    torchrun --nproc-per-node 2 examples/ranks.py

Each rank has the whole data set and reads its part of it; the posterior is the same on all ranks. With GPUs, use
the backend "nccl", call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`, and move the model there.
"""

from __future__ import annotations

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import errbar


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(1500, 2, generator=generator), torch.arange(1500) % 3
    x += 2 * torch.eye(3)[y][:, :2]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = x.double()
    for _ in range(100):  # the same on all ranks; or DistributedDataParallel, which errbar looks through
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:1000]), y[:1000]).backward()
        optimizer.step()

    posterior = errbar.fit(model, TensorDataset(x[:1000], y[:1000]), last_layers=2)
    posterior = errbar.calibrate(posterior, TensorDataset(x[1000:], y[1000:]))
    prediction = posterior.predict(torch.tensor([[1.0, 1.0], [9.0, -9.0]], dtype=torch.float64))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{dist.get_world_size() if dist.is_initialized() else 1} processes")
        print(f"{posterior.information.n_samples} samples, T {posterior.temperature:.4f}")
        print(f"error bars {[[round(float(value), 4) for value in row] for row in prediction.std]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
