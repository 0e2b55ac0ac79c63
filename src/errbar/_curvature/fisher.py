"""The Fisher information of one categorical observation in its logits, and its square root.

With f = softmax(g):

- `ggn`: Λ = diag f − f fᵀ = R Rᵀ with R = diag √f − f √fᵀ, the Fisher information as eq:parmaCovariance defines it;
- `eta`: the diagonal of Λ alone, η_m = f_m (1 − f_m), as eq:information_with_M writes it out.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from errbar.errors import ArgumentError

Fisher = Literal["ggn", "eta"]


def require_fisher(fisher: str) -> Fisher:
    if fisher not in get_args(Fisher):
        raise ArgumentError(
            f"fisher is {fisher!r}; expected 'ggn' (the Fisher information of the categorical likelihood) or 'eta' "
            "(its diagonal, as the paper writes it out)."
        )
    return fisher  # type: ignore[return-value]


def comes_apart_by_class(fisher: Fisher, *, returns_logits: bool) -> bool:
    """Whether the information of one layer alone is one matrix for each class: Λ is diagonal, and so is ∂g/∂a."""
    return returns_logits and fisher == "eta"


def fisher_diagonal(logits: Float[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """η, the diagonal of Λ, in float64 because 1 − f has no digits left in float32 where the network is certain."""
    probability = torch.softmax(logits.double(), 1)
    return probability * (1 - probability)


def fisher_matrix(logits: Float[Tensor, "B M"], fisher: Fisher) -> Float[Tensor, "B M M"]:
    """Λ, or its diagonal, in float64."""
    if fisher == "eta":
        return torch.diag_embed(fisher_diagonal(logits))
    probability = torch.softmax(logits.double(), 1)
    return torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]


def fisher_root(logits: Float[Tensor, "B M"], fisher: Fisher) -> Float[Tensor, "B M M"]:
    """R with R Rᵀ = Λ, in float64."""
    if fisher == "eta":
        return torch.diag_embed(fisher_diagonal(logits).sqrt())
    probability = torch.softmax(logits.double(), 1)
    root = probability.sqrt()
    return torch.diag_embed(root) - probability[:, :, None] * root[:, None, :]


def weighted_rows(
    logits: Float[Tensor, "B M"], jacobian: Float[Tensor, "B M n"], fisher: Fisher, dtype: torch.dtype
) -> Float[Tensor, "k n"]:
    """The rows U_nᵀ = R_nᵀ J_n of all samples, R R ᵀ = Λ."""
    root = fisher_root(logits, fisher).to(dtype)
    return (root.mT @ jacobian.to(dtype)).flatten(0, 1)
