"""Per-sample Jacobians ∂g(x; θ)/∂θ_r for any architecture that treats samples independently."""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev, vjp, vmap
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


class _SameSizeError(Exception):
    """As many samples are mapped over as derivatives.

    A batching rule that confuses the two (torch's of PReLU) fails where their numbers differ, and the general way takes
    over; where they are the same it returns wrong numbers. So they are never the same.
    """


def jacobians(network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "B M n"]:
    """J of each sample in the network's own dtype, each from a pass of that sample alone (never O(B²))."""
    if network.keeps_graph or not batch.can_be_mapped:
        # Mapped layer norms have a graph that does not lead all the way to the inputs.
        return _one_by_one(network, selection, batch)
    try:
        try:
            return _vectorised(network, selection, batch)
        except _SameSizeError:
            return torch.cat([_vectorised(network, selection, part) for part in _in_two(batch)])
    except RuntimeError as error:
        if "randomness" in str(error):
            raise ModelError(RANDOM_IN_EVAL) from error
        # Some operations have no batching rule (data-dependent control flow, fused recurrent kernels). If the model
        # itself is at fault, the plain loop raises its own error.
        return _one_by_one(network, selection, batch)


def _vectorised(network: Network, selection: Selection, batch: Batch) -> Float[Tensor, "B M n"]:
    size = len(batch)

    def single(values: dict[str, Tensor], sample: list[Tensor]) -> Float[Tensor, "M"]:
        logits = network.logits(batch.with_sample(sample), values)[0]
        if len(logits) == size > 1:
            raise _SameSizeError
        return logits

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
                    create_graph=network.keeps_graph,
                )
                if logits.requires_grad
                else [torch.zeros_like(value) for value in values.values()]
                for m in range(len(logits))
            ]
            row_of_all = torch.stack([_joined([part.reshape(-1) for part in row]) for row in gradients])
            rows.append(row_of_all if network.keeps_graph else row_of_all.detach())
    return torch.stack(rows)


def _in_two(batch: Batch) -> tuple[Batch, Batch]:
    return batch.rows(0, 1), batch.rows(1, len(batch))


def pulled_back(
    network: Network, selection: Selection, batch: Batch, vectors: Float[Tensor, "B c M"]
) -> Float[Tensor, "B c n"]:
    """vᵀJ for c vectors of each sample, by products that go through that sample alone and never form J."""
    if network.keeps_graph or not batch.can_be_mapped:
        return _products_one_by_one(network, selection, batch, vectors)
    try:
        if len(batch) != vectors.shape[1] or len(batch) == 1:
            return _vectorised_products(network, selection, batch, vectors)
        pairs = zip(_in_two(batch), (vectors[:1], vectors[1:]), strict=True)
        return torch.cat([_vectorised_products(network, selection, *pair) for pair in pairs])
    except RuntimeError as error:
        if "randomness" in str(error):
            raise ModelError(RANDOM_IN_EVAL) from error
        # An operation without a batching rule. If the model itself is at fault, the plain loop raises its own error.
        return _products_one_by_one(network, selection, batch, vectors)


def _vectorised_products(
    network: Network, selection: Selection, batch: Batch, vectors: Float[Tensor, "B c M"]
) -> Float[Tensor, "B c n"]:
    size = len(batch)
    values = selection.values(network.module)

    def single(sample: list[Tensor], cotangents: Tensor) -> dict[str, Tensor]:
        back = vjp(lambda given: network.logits(batch.with_sample(sample), given)[0], values)[1]
        gradients: dict[str, Tensor] = vmap(back)(cotangents)[0]
        return gradients

    # Fused attention kernels have no batching rule for their derivative; the plain formula has.
    with quiet_vmap(), sdpa_kernel(SDPBackend.MATH):
        parts = vmap(single)(batch.over_samples(), vectors)
    rows = vectors.new_empty(size, vectors.shape[1], selection.n_parameters)
    for name, where in selection.slices().items():
        # `flatten(2)` would refuse the derivative by a parameter without dimensions, which has no third one.
        rows[:, :, where] = parts.pop(name).reshape(*rows.shape[:2], -1)
    return rows


def _products_one_by_one(
    network: Network, selection: Selection, batch: Batch, vectors: Float[Tensor, "B c M"]
) -> Float[Tensor, "B c n"]:
    rows = vectors.new_zeros(len(batch), vectors.shape[1], selection.n_parameters)
    values = {name: value.clone().requires_grad_() for name, value in selection.values(network.module).items()}
    with torch.enable_grad():
        for index in range(len(batch)):
            logits = network.logits(batch.rows(index, index + 1), values)[0]
            if not logits.requires_grad:
                continue
            for column, vector in enumerate(vectors[index]):
                gradients = torch.autograd.grad(
                    logits,
                    list(values.values()),
                    vector,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                    create_graph=network.keeps_graph,
                )
                rows[index, column] = torch.cat([part.reshape(-1) for part in gradients])
    return rows


def each_by_itself(
    network: Network, selection: Selection, batch: Batch, seeds: Float[Tensor, "k B M"] | None = None
) -> Float[Tensor, "B k n"]:
    """J of each sample, or of the combinations of its logits that `seeds` say."""
    if seeds is None:
        return jacobians(network, selection, batch)
    dtype = network.input_dtype or network.dtype
    return pulled_back(network, selection, batch, seeds.transpose(0, 1).to(dtype))


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
