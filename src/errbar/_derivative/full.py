"""Per-sample Jacobians ∂g(x; θ)/∂θ_r for any architecture that treats samples independently."""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from errbar._derivative.trace import quiet_vmap
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ModelError

RANDOM_IN_EVAL = (
    "The model draws random numbers in eval mode, so its logits are not a function of its input. Use nn.Dropout (which "
    "eval mode switches off) instead of functional dropout."
)


def jacobians(network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "B M n"]:
    """J of each sample in the network's own dtype, each from a pass of that sample alone (never O(B²))."""
    if not batch.can_be_mapped:
        return _one_by_one(network, selection, batch)
    try:
        return _vectorised(network, selection, batch)
    except RuntimeError as error:
        if "randomness" in str(error):
            raise ModelError(RANDOM_IN_EVAL) from error
        # Some operations have no batching rule (data-dependent control flow, fused recurrent kernels). If the model
        # itself is at fault, the plain loop raises its own error.
        return _one_by_one(network, selection, batch)


def _vectorised(network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "B M n"]:
    def single(values: dict[str, Tensor], sample: list[Tensor]) -> Float[Tensor, "M"]:
        return network.logits(batch.with_sample(sample), values)[0]

    # Fused attention kernels have no batching rule for their derivative; the plain formula has.
    with quiet_vmap(), sdpa_kernel(SDPBackend.MATH):
        parts = vmap(jacrev(single), in_dims=(None, 0))(selection.values(network.module), batch.over_samples())
    # `flatten(2)` would refuse the derivative by a parameter without dimensions, which has no third one.
    return _joined([parts[name].reshape(*parts[name].shape[:2], -1) for name in selection.names])


def _one_by_one(network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "B M n"]:
    rows = []
    values = {name: value.clone().requires_grad_() for name, value in selection.values(network.module).items()}
    with torch.enable_grad():
        for index in range(len(batch)):
            logits = network.logits(batch.rows(index, index + 1), values)[0]
            gradients = [
                torch.autograd.grad(
                    logits[m],
                    list(values.values()),
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
                if logits.requires_grad
                else [torch.zeros_like(value) for value in values.values()]
                for m in range(len(logits))
            ]
            rows.append(torch.stack([_joined([part.reshape(-1) for part in row]) for row in gradients]).detach())
    return torch.stack(rows)


def _joined(parts: list[Tensor]) -> Tensor:
    """Derivatives by one parameter after the other, in the widest of their dtypes."""
    dtype = reduce(torch.promote_types, (part.dtype for part in parts))
    return torch.cat([part.to(dtype) for part in parts], -1)


def require_deterministic(network: Network, batch: Batch) -> None:
    """Refuse a model that draws random numbers in eval mode: its derivative is not defined."""
    first, second = network.logits(batch), network.logits(batch)
    # Logits that are not finite have an error of their own.
    if bool(((first - second).abs() > 1e-2 * first.abs().amax()).any()):
        raise ModelError(RANDOM_IN_EVAL)


def pulled_back_by_the_whole_model(
    network: Network, selection: Selection, batch: Batch
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "n"], float]:
    """Random v_n, Σ_n v_nᵀ J_n by differentiating the whole model, and the relative error that rounding explains.

    The terms of a layer must give the same. They do not where a weight is also used outside its layer (a norm of it, a
    tied product), which no hook of a module shows.
    """
    values = {name: value.clone().requires_grad_() for name, value in selection.values(network.module).items()}
    with torch.enable_grad():
        logits = network.logits(batch, values)
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(logits.shape, generator=generator).to(logits)
        gradients = torch.autograd.grad(
            (logits * vectors).sum(), list(values.values()), allow_unused=True, materialize_grads=True
        )
    truth = torch.cat([gradient.reshape(-1).double() for gradient in gradients])
    return vectors, truth, rounding_of(logits.dtype, *(value.dtype for value in values.values()))


def rounding_of(*dtypes: torch.dtype) -> float:
    """The relative error that rounding explains, of a derivative through values of these dtypes."""
    return max({torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.1) for dtype in dtypes)
