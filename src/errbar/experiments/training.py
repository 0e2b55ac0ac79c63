"""Training that depends on its seed and on nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from errbar._base.progress import track
from errbar.errors import DataError

Model = TypeVar("Model", bound=nn.Module)


def train(
    model: Model,
    x: Float[Tensor, "N ..."],
    y: Int[Tensor, " N"] | Float[Tensor, "N M"],
    *,
    epochs: int,
    learning_rate: float,
    weight_decay: float,
    batch_size: int,
    seed: int,
    bfloat16: bool = False,
    progress: bool = False,
    description: str = "Training",
) -> Model:
    """A trained copy of `model`, in eval mode: Adam on the mean cross-entropy −(1/B) Σ ln f_{y_n}(x_n; θ).

    The seed decides the initial weights, the order of the samples and the dropout; the weights that `model`
    comes with do not matter. Labels may be probabilities, one for each class. With `bfloat16` the forward pass runs in
    that dtype where autocast considers it safe, on pictures in channels-last layout, in which such convolutions are
    fast; weights and sums keep their dtype.
    `weight_decay` is Adam's (l² inside the gradient); it corresponds to the prior
    `Prior.from_weight_decay(weight_decay, len(x))`.
    """
    if len(x) == 0 or len(x) != len(y):
        raise DataError(f"Training needs as many labels as inputs, and at least one; got {len(x)} and {len(y)}.")
    model = copy.deepcopy(model)
    shuffling = torch.Generator().manual_seed(seed)
    with seeded(seed, x.device):
        initialise(model)
        model.train()
        optimiser = torch.optim.Adam(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
        for _ in track(range(epochs), description, enabled=progress):
            order = torch.randperm(len(x), generator=shuffling).to(x.device)
            for start in range(0, len(x), batch_size):
                batch = order[start : start + batch_size]
                inputs = x[batch]
                if bfloat16 and x.ndim == 4:
                    inputs = inputs.contiguous(memory_format=torch.channels_last)
                optimiser.zero_grad(set_to_none=True)
                with torch.autocast(x.device.type, torch.bfloat16, enabled=bfloat16):
                    logits = model(inputs)
                nn.functional.cross_entropy(logits.float() if bfloat16 else logits, y[batch]).backward()
                optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return model.eval()


def initialise(model: nn.Module) -> None:
    """Redraw the initial weights, by each layer's own rule, from the global generator."""
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global generators start from `seed`; afterwards they are as before.

    Dropout and the layers' own initialisation draw from the global generator and take no other.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
