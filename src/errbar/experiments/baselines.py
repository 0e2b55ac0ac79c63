"""The methods to compare with: PMFs (N, M) from the softmax, from a deep ensemble, from MC dropout."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar.errors import ArgumentError
from errbar.experiments.training import seeded

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@torch.no_grad()
def softmax_pmf(model: nn.Module, x: Float[Tensor, "N ..."], temperature: float = 1.0) -> Float[Tensor, "N M"]:
    """(i) Standard, and (ii) temperature scaling: f(x; θ̂, T) = softmax(g(x; θ̂)/T), in eval mode."""
    logits: Tensor = copy.deepcopy(model).eval()(x)
    return (logits / temperature).softmax(dim=-1)


def ensemble_pmf(models: Sequence[nn.Module], x: Float[Tensor, "N ..."]) -> Float[Tensor, "N M"]:
    """(iii) Deep ensemble: (1/C) Σ_c softmax g(x; θ̂_c)."""
    return ensemble_pmfs(models, x).mean(dim=0)


def ensemble_pmfs(models: Sequence[nn.Module], x: Float[Tensor, "N ..."]) -> Float[Tensor, "C N M"]:
    """The PMF of each member."""
    if not models:
        raise ArgumentError("A deep ensemble needs at least one network; got none.")
    return torch.stack([softmax_pmf(model, x) for model in models])


def dropout_pmf(
    model: nn.Module, x: Float[Tensor, "N ..."], *, samples: int = 50, seed: int = 0
) -> Float[Tensor, "N M"]:
    """(iv) MC dropout: (1/K) Σ_k softmax g(x; θ̂ with dropout mask k)."""
    return dropout_pmfs(model, x, samples=samples, seed=seed).mean(dim=0)


@torch.no_grad()
def dropout_pmfs(
    model: nn.Module, x: Float[Tensor, "N ..."], *, samples: int = 50, seed: int = 0
) -> Float[Tensor, "K N M"]:
    """The PMF of each stochastic pass.

    Only the dropout modules are put in training mode, and only on a copy: `model` stays as it is.
    """
    if samples < 1:
        raise ArgumentError(f"samples counts the stochastic passes and is at least 1; got {samples}.")
    model = copy.deepcopy(model).eval()
    active = [module.train() for module in model.modules() if isinstance(module, _DROPOUT)]
    if not any(module.p > 0.0 for module in active):
        raise ArgumentError(
            "MC dropout needs a network with dropout at a rate above 0; this one has none. "
            "Build and train it with dropout, e.g. paper_network(inputs, dropout=0.2)."
        )
    with seeded(seed, x.device):
        return torch.stack([model(x).softmax(dim=-1) for _ in range(samples)])
