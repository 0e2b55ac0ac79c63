"""Norm layers: scales γ and shifts β, whose Jacobians come with the backward pass that other layers need anyway.

A norm layer returns a = γ ∘ x̂ + β. Each sample n gets zeros of its own added to γ and β,
    a_n + δγ_n ∘ x̂_n + δβ_n,   δ = 0,
which changes no value; the derivative of the logits by δ_n is the Jacobian of sample n alone. It has a number for each
parameter, where ∂g/∂a has one for each output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from errbar._derivative.trace import Call, own_parameters
from errbar._model.network import Network
from errbar._model.selection import Selection


@dataclass(frozen=True)
class NormLayer:
    """A norm layer and where its selected parameters start in the flat vector; None for one that is not selected."""

    name: str
    shape: tuple[int, ...]
    weight_start: int | None
    bias_start: int | None

    @property
    def spans(self) -> list[tuple[slice, int]]:
        """For the scales and for the shifts: which entries of δ they are, and where they start in the flat vector."""
        size = torch.Size(self.shape).numel()
        starts = [start for start in (self.weight_start, self.bias_start) if start is not None]
        return [(slice(index * size, (index + 1) * size), start) for index, start in enumerate(starts)]

    @property
    def width(self) -> int:
        """How many parameters are selected."""
        return sum(where.stop - where.start for where, _ in self.spans)

    def probe(
        self, module: nn.Module, inputs: Float[Tensor, "B ..."], output: Float[Tensor, "B ..."]
    ) -> tuple[Float[Tensor, "B width"], Float[Tensor, "B ..."]]:
        """δ, and a + δγ ∘ x̂ + δβ."""
        if inputs.ndim <= len(self.shape):
            return output, output  # a sample without the dimension of samples, which is refused later
        zeros = output.new_zeros(len(inputs), self.width, requires_grad=True)
        alone = (1,) * (inputs.ndim - 1 - len(self.shape))
        trailing = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        each = (len(inputs), *alone, *self.shape) if trailing else (len(inputs), *self.shape, *alone)
        shifts = [zeros[:, where].reshape(each) for where, _ in self.spans]
        if self.weight_start is not None:
            output = output + shifts[0] * _normalised(module, inputs).to(output.dtype)
        if self.bias_start is not None:
            output = output + shifts[-1]
        return zeros, output

    def accepts(self, calls: Sequence[Call], size: int) -> bool:
        """Whether it was called, and every input runs over the samples."""
        return bool(calls) and all(
            not call.inputs.is_nested and call.inputs.ndim > len(self.shape) and len(call.inputs) == size
            for call in calls
        )


def norm_layer_in(selection: Selection, name: str) -> NormLayer | None:
    """The norm layer of that name, by its parameters alone; None if none of them is selected."""
    slices, shapes = selection.slices(), dict(zip(selection.names, selection.shapes, strict=True))
    own = {kind: f"{name}.{kind}" if name else kind for kind in ("weight", "bias")}
    starts = {kind: slices[full].start for kind, full in own.items() if full in slices}
    if not starts:
        return None
    shape = next(shapes[own[kind]] for kind in starts)
    return NormLayer(name, shape, starts.get("weight"), starts.get("bias"))


def norm_layers(network: Network, selection: Selection) -> list[NormLayer]:
    """Norm layers over batches, layers, groups and root mean squares, whose parameters are theirs alone."""
    found = []
    for name, part, where in own_parameters(network, selection):
        # A subclass with a forward of its own may do anything.
        known = (kind for kind in (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm) if isinstance(part, kind))
        kind = next(known, None)
        parameter = part._parameters.get("weight")
        if kind is not None and parameter is not None and type(part).forward is kind.forward:
            found.append(NormLayer(name, tuple(parameter.shape), where.get("weight"), where.get("bias")))
    return found


def _normalised(module: nn.Module, inputs: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """x̂, as the module computes it in eval mode."""
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(inputs, module.normalized_shape, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(inputs, module.num_groups, None, None, module.eps)
    assert isinstance(module, _BatchNorm)
    return F.batch_norm(inputs, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
