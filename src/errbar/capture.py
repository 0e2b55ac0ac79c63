"""Linear layers seen from both sides, so that no Jacobian has to be formed for them.

A linear layer that is used once, with input h (a 1 appended for the bias) and output a = W h, has the Jacobian
    ∂g/∂W = V ⊗ hᵀ,   V = ∂g/∂a  (M × d; the identity for a layer that returns the logits themselves).
`capture` runs the network once, notes h and a on the way, and takes M vector-Jacobian products of the logits for V. The
layers in between may be anything that treats samples independently. A layer that is applied to tokens t has
J = Σ_t V_t ⊗ h_tᵀ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar.data import Batch
from errbar.jacobian import quiet_vmap
from errbar.layers import Selection
from errbar.network import Network, as_logits, run


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer and where its selected parameters start in the flat vector; None for one that is not selected."""

    name: str
    outputs: int
    inputs: int
    weight_start: int | None
    bias_start: int | None

    @property
    def weight(self) -> slice | None:
        """Where the weight lies in the flat vector."""
        start = self.weight_start
        return None if start is None else slice(start, start + self.outputs * self.inputs)

    @property
    def bias(self) -> slice | None:
        """Where the bias lies in the flat vector."""
        return None if self.bias_start is None else slice(self.bias_start, self.bias_start + self.outputs)

    @property
    def width(self) -> int:
        """p, the length of h: the inputs, and one for the bias."""
        return (self.inputs if self.weight is not None else 0) + (1 if self.bias is not None else 0)

    def positions(self) -> Tensor:
        """Where parameter (output i, entry a of h) lies in the flat vector: (d, p)."""
        parts = []
        if self.weight is not None:
            parts.append(torch.arange(self.weight.start, self.weight.stop).reshape(self.outputs, self.inputs))
        if self.bias is not None:
            parts.append(torch.arange(self.bias.start, self.bias.stop)[:, None])
        return torch.cat(parts, 1)

    def spans(self, start: int, stop: int) -> list[tuple[slice, slice]]:
        """For outputs start … stop−1: which entries of h, and where their parameters lie in the flat vector."""
        found = []
        if self.weight_start is not None:
            first, last = self.weight_start + start * self.inputs, self.weight_start + stop * self.inputs
            found.append((slice(0, self.inputs), slice(first, last)))
        if self.bias_start is not None:
            found.append((slice(self.width - 1, self.width), slice(self.bias_start + start, self.bias_start + stop)))
        return found

    def augmented(self, inputs: Float[Tensor, "*B q"]) -> Float[Tensor, "*B p"]:
        """h: what the layer was given, as far as its weight is selected, and a one for its bias."""
        if self.bias is None:
            return inputs
        ones = inputs.new_ones(*inputs.shape[:-1], 1)
        return ones if self.weight is None else torch.cat([inputs, ones], -1)


@dataclass(frozen=True, eq=False)
class Factor:
    """One term V ⊗ hᵀ of the Jacobian of a layer, for B samples; `outer` is None where V is the identity."""

    layer: LinearLayer
    inner: Float[Tensor, "B p"]
    outer: Float[Tensor, "B M d"] | None

    def jacobian(self) -> Float[Tensor, "B M d p"]:
        if self.outer is None:
            identity = torch.eye(self.layer.outputs, dtype=self.inner.dtype, device=self.inner.device)
            return identity[None, :, :, None] * self.inner[:, None, None, :]
        return self.outer[..., None] * self.inner[:, None, None, :]

    def pulled_back(self, vectors: Float[Tensor, "B M"]) -> Float[Tensor, "d p"]:
        """Σ_n v_nᵀ J_n of this term, without forming J."""
        outer = vectors if self.outer is None else torch.einsum("bm,bmd->bd", vectors, self.outer)
        return outer.T @ self.inner

    def to(self, dtype: torch.dtype) -> Factor:
        return Factor(self.layer, self.inner.to(dtype), None if self.outer is None else self.outer.to(dtype))


@dataclass(frozen=True, eq=False)
class _Call:
    """What a layer was given, what it returned, the copy that went on, and the version which that had."""

    inputs: Tensor
    output: Tensor
    passed_on: Tensor
    version: int


def linear_layers(network: Network, selection: Selection) -> list[LinearLayer]:
    """The linear layers whose parameters are selected and belong to nothing else."""
    owners = Counter(id(p) for part in network.module.modules() for p in part._parameters.values() if p is not None)
    slices = selection.slices()
    found = []
    for name, part in network.module.named_modules():
        # A subclass with a forward of its own may do anything.
        if not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
            continue
        where = {}
        for kind in ("weight", "bias"):
            parameter = part._parameters.get(kind)
            full = f"{name}.{kind}" if name else kind
            if parameter is not None and full in slices and owners[id(parameter)] == 1:
                where[kind] = slices[full].start
        if where:
            layer = LinearLayer(name, part.out_features, part.in_features, where.get("weight"), where.get("bias"))
            found.append(layer)
    return found


def capture(
    network: Network, layers: Sequence[LinearLayer], batch: Batch
) -> tuple[Float[Tensor, "B M"], dict[str, list[Factor]] | None]:
    """The logits, and the terms V ⊗ hᵀ of each layer: one, or one for each token.

    None in place of the terms when a layer was not called exactly once, or its input does not start with the samples.
    """
    replica = network.replica()
    size = len(batch)
    seen: dict[str, list[_Call]] = {layer.name: [] for layer in layers}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            inputs = args[0] if args else kwargs["input"]
            # The graph starts at the first selected layer: what comes before it is not differentiated.
            torch.set_grad_enabled(True)
            output = output if output.requires_grad else output.detach().requires_grad_()
            # The rest of the network gets a copy, because an activation may overwrite what it is given.
            passed_on = output.clone()
            seen[name].append(_Call(inputs.detach(), output, passed_on, passed_on._version))
            return passed_on

        return hook

    modules = dict(replica.named_modules())
    # Before hooks of the user, which may change what the layer passes on.
    handles = [
        modules[layer.name].register_forward_hook(note(layer.name), with_kwargs=True, prepend=True) for layer in layers
    ]
    try:
        with torch.no_grad():
            result = as_logits(run(replica, batch), size)
    finally:
        for handle in handles:
            handle.remove()
    if any(len(calls) != 1 or len(calls[0].inputs) != size or calls[0].inputs.ndim < 2 for calls in seen.values()):
        return result.detach(), None
    # The logits themselves, unless they were overwritten in place on the way out.
    outputs = {
        name: call.output
        for name, (call,) in seen.items()
        if call.passed_on is not result or call.passed_on._version != call.version
    }
    derivatives = _derivatives(result, outputs)
    factors = {layer.name: _factors(layer, seen[layer.name][0].inputs, derivatives.get(layer.name)) for layer in layers}
    return result.detach(), factors


def _derivatives(logits: Float[Tensor, "B M"], outputs: dict[str, Tensor]) -> dict[str, Float[Tensor, "M B *T d"]]:
    """∂g/∂a for each layer output a, by M vector-Jacobian products of the whole batch."""
    if not outputs:
        return {}
    size, classes = logits.shape
    targets = list(outputs.values())
    if not logits.requires_grad:
        return {name: a.detach().new_zeros(classes, *a.shape) for name, a in outputs.items()}
    seeds = torch.eye(classes, dtype=logits.dtype, device=logits.device)[:, None, :].expand(classes, size, classes)
    try:
        with quiet_vmap():
            gradients = torch.autograd.grad(
                logits, targets, seeds, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
    except RuntimeError:
        # An operation without a batching rule: one class after the other.
        rows = [torch.autograd.grad(logits, targets, seed, allow_unused=True, retain_graph=True) for seed in seeds]
        columns = zip(*rows, strict=True)
        gradients = tuple(None if column[0] is None else torch.stack(column) for column in columns)  # type: ignore[misc]
    return {
        name: a.detach().new_zeros(classes, *a.shape) if gradient is None else gradient
        for (name, a), gradient in zip(outputs.items(), gradients, strict=True)
    }


def _factors(
    layer: LinearLayer, inputs: Float[Tensor, "B *T q"], derivative: Float[Tensor, "M B *T d"] | None
) -> list[Factor]:
    """One term, or one for each token."""
    inner = layer.augmented(inputs)
    if inner.ndim == 2:
        return [Factor(layer, inner, None if derivative is None else derivative.transpose(0, 1))]
    assert derivative is not None
    tokens = inner.flatten(1, -2)
    outer = derivative.flatten(2, -2).permute(1, 2, 0, 3)
    return [Factor(layer, tokens[:, t], outer[:, t]) for t in range(tokens.shape[1])]
