"""Layers whose Jacobian of each sample comes as columns, with the backward pass that other layers need anyway.

A norm layer returns a = γ ∘ x̂ + β. Each sample n gets zeros of its own added to γ and β,
    a_n + δγ_n ∘ x̂_n + δβ_n,   δ = 0,
which changes no value; the derivative of the logits by δ_n is the Jacobian of sample n alone. It has a number for each
parameter, where ∂g/∂a has one for each output. A PReLU, a = max(x, 0) + γ ∘ min(x, 0), is taken as a norm is: its
slopes γ are scales of x̂ = min(x, 0).

A convolution in G groups gets zeros δ_n added to its weight in the same way. The derivative by δ_n follows from the
input x_n and V_n = ∂g_n/∂a_n,
    ∂g_n/∂w[o, c, k] = Σ_t V_n[o, t] x_n[c(o), s t + k],
the derivative by the weight of one convolution in B G groups, of all samples side by side.

Where only one combination of the logits is differentiated, a batch norm gives its columns in that way too: the
derivatives by scale and shift of a norm with B times the channels, Σ_t V_n x̂_n and Σ_t V_n, by one kernel that makes
neither x̂ nor the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from errbar._derivative.layers import Call, Patches, own_parameters
from errbar._model.convolutions import convolution_kind
from errbar._model.network import Network
from errbar._model.selection import Selection


class _WithColumns(torch.autograd.Function):
    """The output of a layer as it is, with zeros δ (B, width) whose derivative follows from that by the output.

    Nothing is copied: the output counts as overwritten, so that an activation may overwrite it in turn.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, zeros: Tensor, columns: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.columns = columns
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.columns(gradient), None


def _with_columns(
    output: Float[Tensor, "B ..."], width: int, columns: Callable[[Tensor], Tensor]
) -> tuple[Float[Tensor, "B width"], Float[Tensor, "B ..."]]:
    zeros = output.new_zeros(len(output), width, requires_grad=True)
    # A view, or a leaf of the graph, cannot be overwritten.
    own = output.clone() if output._is_view() or (output.is_leaf and output.requires_grad) else output
    return zeros, _WithColumns.apply(own, zeros, columns)  # type: ignore[no-untyped-call]


def _spans(starts: Iterable[tuple[int | None, int]]) -> list[tuple[slice, int]]:
    """Where tensors of so many numbers are among the columns, and where they start in the flat vector."""
    spans, first = [], 0
    for start, size in starts:
        if start is not None:
            spans.append((slice(first, first + size), start))
            first += size
    return spans


@dataclass(frozen=True)
class NormLayer:
    """A norm layer, or a PReLU, and where its selected parameters start in the flat vector; None for one that is not
    selected."""

    name: str
    shape: tuple[int, ...]
    weight_start: int | None
    bias_start: int | None

    @property
    def spans(self) -> list[tuple[slice, int]]:
        """For the scales and for the shifts: which entries of δ they are, and where they start in the flat vector."""
        size = torch.Size(self.shape).numel()
        return _spans([(self.weight_start, size), (self.bias_start, size)])

    @property
    def width(self) -> int:
        """How many parameters are selected."""
        return sum(where.stop - where.start for where, _ in self.spans)

    def probe(
        self, module: nn.Module, inputs: Float[Tensor, "B ..."], output: Float[Tensor, "B ..."]
    ) -> tuple[Float[Tensor, "B width"], Float[Tensor, "B ..."]]:
        """δ, and a + δγ ∘ x̂ + δβ."""
        if inputs.ndim <= len(self.shape):
            return output, output  # a single sample without a batch dimension, which is refused later
        zeros = output.new_zeros(len(inputs), self.width, requires_grad=True)
        ones = (1,) * (inputs.ndim - 1 - len(self.shape))
        trailing = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        shape = (len(inputs), *ones, *self.shape) if trailing else (len(inputs), *self.shape, *ones)
        shifts = [zeros[:, where].reshape(shape) for where, _ in self.spans]
        if self.weight_start is not None:
            output = output + shifts[0] * _normalised(module, inputs).to(output.dtype)
        if self.bias_start is not None:
            output = output + shifts[-1]
        return zeros, output

    def probe_alone(
        self, module: nn.Module, inputs: Float[Tensor, "B ..."], output: Float[Tensor, "B ..."]
    ) -> tuple[Float[Tensor, "B width"], Float[Tensor, "B ..."]]:
        """The same for the derivative of one combination of the logits."""
        is_fused = isinstance(module, _BatchNorm) and module.running_mean is not None and output.device.type == "cpu"
        is_plain = inputs.dtype == output.dtype in (torch.float32, torch.float64) and inputs.ndim > len(self.shape)
        if not is_fused or not is_plain:
            return self.probe(module, inputs, output)
        return _with_columns(output, self.width, lambda derivative: self._columns(module, inputs, derivative))

    def _columns(
        self, module: nn.Module, inputs: Float[Tensor, "B c ..."], derivative: Float[Tensor, "B c ..."]
    ) -> Float[Tensor, "B width"]:
        """Σ_t V x̂ and Σ_t V of each sample and channel."""
        size, channels = inputs.shape[:2]
        mean, variance = (getattr(module, name).to(inputs.dtype) for name in ("running_mean", "running_var"))
        _, scales, shifts = torch.ops.aten.native_batch_norm_backward(
            derivative.reshape(1, size * channels, *inputs.shape[2:]),
            inputs.reshape(1, size * channels, *inputs.shape[2:]),
            None,
            mean.repeat(size),
            variance.repeat(size),
            None,
            None,
            False,
            module.eps,
            [False, True, True],
        )
        pairs = ((self.weight_start, scales), (self.bias_start, shifts))
        return torch.cat([part.reshape(size, channels) for start, part in pairs if start is not None], 1)

    def accepts(self, calls: Sequence[Call], size: int) -> bool:
        """Whether it was called, and the first dimension of every input is the samples."""
        return bool(calls) and all(
            not call.inputs.is_nested and call.inputs.ndim > len(self.shape) and len(call.inputs) == size
            for call in calls
        )


def norm_layer_in(selection: Selection, name: str) -> NormLayer | None:
    """The norm layer of that name, by its parameters alone; None if none of them is selected."""
    slices, shapes = selection.slices(), dict(zip(selection.names, selection.shapes, strict=True))
    full_names = {kind: f"{name}.{kind}" if name else kind for kind in ("weight", "bias")}
    starts = {kind: slices[full].start for kind, full in full_names.items() if full in slices}
    if not starts:
        return None
    shape = next(shapes[full_names[kind]] for kind in starts)
    return NormLayer(name, shape, starts.get("weight"), starts.get("bias"))


def norm_layers(network: Network, selection: Selection) -> list[NormLayer]:
    """Norm layers over batches, layers, groups and root mean squares, and PReLUs, whose parameters are theirs alone."""
    layers = []
    for name, part, where in own_parameters(network, selection):
        # A subclass with a forward of its own may do anything.
        kind = next((kind for kind in _KINDS if isinstance(part, kind)), None)
        parameter = part._parameters.get("weight")
        if kind is not None and parameter is not None and type(part).forward is kind.forward:
            layers.append(NormLayer(name, tuple(parameter.shape), where.get("weight"), where.get("bias")))
    return layers


_KINDS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU)


def _normalised(module: nn.Module, inputs: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """x̂, as the module computes it in eval mode."""
    if isinstance(module, nn.PReLU):
        return inputs.clamp_max(0)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(inputs, module.normalized_shape, None, None, module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(inputs, module.normalized_shape, None, module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(inputs, module.num_groups, None, None, module.eps)
    assert isinstance(module, _BatchNorm)
    return F.batch_norm(inputs, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)


@dataclass(frozen=True)
class GroupedConvolution:
    """A convolution in `groups`, with `inputs` numbers of a patch for each of its `outputs`, and where its selected
    parameters start in the flat vector; None for one that is not selected."""

    name: str
    outputs: int
    inputs: int
    groups: int
    weight_start: int | None
    bias_start: int | None
    patches: Patches

    @property
    def spans(self) -> list[tuple[slice, int]]:
        """For the weight and for the bias: which entries of δ they are, and where they start in the flat vector."""
        return _spans([(self.weight_start, self.outputs * self.inputs), (self.bias_start, self.outputs)])

    @property
    def width(self) -> int:
        """How many parameters are selected."""
        return sum(where.stop - where.start for where, _ in self.spans)

    def probe(
        self, module: nn.Module, inputs: Float[Tensor, "B ..."], output: Float[Tensor, "B ..."]
    ) -> tuple[Float[Tensor, "B width"], Float[Tensor, "B ..."]]:
        """δ, and a with δ added to the weight and the bias of each sample."""
        if not self._fits(inputs) or len(inputs) != len(output):
            return output, output
        return _with_columns(output, self.width, lambda derivative: self.columns(inputs, derivative))

    probe_alone = probe

    def columns(
        self, inputs: Float[Tensor, "B c *size"], derivative: Float[Tensor, "B d *places"]
    ) -> Float[Tensor, "B width"]:
        """The derivatives by the weight and by the bias, of each sample."""
        size, parts = len(inputs), []
        if self.weight_start is not None:
            images = self.patches.images(inputs).to(derivative.dtype)
            places = derivative if derivative.ndim == 4 else derivative[:, :, None]
            kernel = self.patches.kernel
            weights = images.new_empty(size * self.outputs, self.inputs // torch.Size(kernel).numel(), *kernel)
            _, gradient, _ = torch.ops.aten.convolution_backward(
                places.reshape(1, size * self.outputs, *places.shape[2:]),
                images.reshape(1, -1, *images.shape[2:]),
                weights,
                None,
                self.patches.stride,
                (0, 0),
                self.patches.dilation,
                False,
                (0, 0),
                size * self.groups,
                (False, True, False),
            )
            parts.append(gradient.reshape(size, -1))
        if self.bias_start is not None:
            parts.append(derivative.flatten(2).sum(2))
        return torch.cat(parts, 1)

    def _fits(self, inputs: Tensor) -> bool:
        return not inputs.is_nested and inputs.ndim == 2 + len(self.patches.padding) // 2

    def accepts(self, calls: Sequence[Call], size: int) -> bool:
        """Whether it was called, and the first dimension of every input is the samples."""
        return bool(calls) and all(self._fits(call.inputs) and len(call.inputs) == size for call in calls)


def grouped_convolutions(network: Network, selection: Selection) -> list[GroupedConvolution]:
    """Convolutions in groups over one or two dimensions, whose parameters are theirs alone."""
    layers = []
    for name, part, where in own_parameters(network, selection):
        if convolution_kind(part) is not None and part.groups > 1:  # type: ignore[operator]
            inputs = part.weight[0].numel()  # type: ignore[index]
            starts = (where.get("weight"), where.get("bias"))
            patches = Patches.of(part)  # type: ignore[arg-type]
            layers.append(GroupedConvolution(name, len(part.weight), inputs, part.groups, *starts, patches))  # type: ignore[arg-type]
    return layers
