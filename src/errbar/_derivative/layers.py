"""Layers whose Jacobians follow from their inputs and from the derivative by their outputs.

A linear layer that is used once, with input h (a 1 appended for the bias) and output a = W h, has the Jacobian
    ∂g/∂W = V ⊗ hᵀ,   V = ∂g/∂a  (M × d; the identity for a layer that returns the logits themselves).

One whose weight is used T times for one sample (a convolution, which is a linear layer applied to patches; a linear
layer applied to tokens) has, with h_t its inputs and V_t = ∂g/∂a_t,
    J = Σ_t V_t ⊗ h_tᵀ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

from errbar._model.convolutions import has_own_forward
from errbar._model.network import Network
from errbar._model.selection import Selection

# The size in bytes of the Jacobians of one layer that are computed at a time.
JACOBIAN_BYTES = {"cpu": 2**25, "cuda": 2**28}


# What is differentiated by: a tensor, or a place in the graph that stays when what comes after overwrites its tensor.
Variable = Tensor | GradientEdge


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer: its inputs, the variable to differentiate by, the output passed on, and its version.

    The variable is the output, or what an `Interception` has added to it.
    """

    inputs: Tensor
    variable: Variable
    output: Tensor
    version: int


def own_parameters(
    network: Network, selection: Selection
) -> Iterator[tuple[str, nn.Module, dict[Literal["weight", "bias"], int]]]:
    """Modules with a selected weight or bias that belongs to nothing else, and where those start in the flat vector."""
    owners = Counter(id(p) for part in network.module.modules() for p in part._parameters.values() if p is not None)
    slices = selection.slices()
    for name, part in network.module.named_modules():
        where: dict[Literal["weight", "bias"], int] = {}
        for kind in ("weight", "bias"):
            parameter = part._parameters.get(kind)
            full = f"{name}.{kind}" if name else kind
            if parameter is not None and full in slices and owners[id(parameter)] == 1:
                where[kind] = slices[full].start
        if where:
            yield name, part, where


def linear_layers(network: Network, selection: Selection) -> list[LinearLayer]:
    """The linear layers whose parameters are selected and belong to nothing else."""
    layers = []
    for name, part, where in own_parameters(network, selection):
        shape = linear_shape(part)
        if shape is not None:
            layers.append(LinearLayer(name, *shape[:2], where.get("weight"), where.get("bias"), shape[2]))
    return layers


def linear_shape(part: nn.Module) -> tuple[int, int, bool] | None:
    """Outputs, inputs and whether the weight is transposed, of a linear layer; None for any other module.

    A subclass with a forward of its own may do anything.
    """
    if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward:
        return part.out_features, part.in_features, False
    # GPT-2's linear layer, known by its name: transformers are not imported here.
    kinds = (
        k for k in type(part).__mro__ if k.__name__ == "Conv1D" and k.__module__.partition(".")[0] == "transformers"
    )
    kind, weight = next(kinds, None), part._parameters.get("weight")
    if kind is None or weight is None or weight.ndim != 2 or type(part).forward is not getattr(kind, "forward", None):
        return None
    return weight.shape[1], weight.shape[0], True


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer and where its selected parameters start in the flat vector; None for one that is not selected.

    The weight is (outputs, inputs) in the flat vector, or where it is `transposed` (inputs, outputs).
    """

    name: str
    outputs: int
    inputs: int
    weight_start: int | None
    bias_start: int | None
    transposed: bool = False

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

    @property
    def size(self) -> int:
        """d p, the number of its selected parameters."""
        return self.outputs * self.width

    def positions(self) -> Tensor:
        """Where parameter (output i, entry a of h) lies in the flat vector: (d, p)."""
        parts = []
        if self.weight is not None:
            parts.append(self.as_rows(torch.arange(self.weight.start, self.weight.stop)))
        if self.bias is not None:
            parts.append(torch.arange(self.bias.start, self.bias.stop)[:, None])
        return torch.cat(parts, 1)

    def as_rows(self, weights: Shaped[Tensor, "*K k"]) -> Shaped[Tensor, "*K d q"]:
        """Flat weights as matrices whose rows are the outputs."""
        leading = weights.shape[:-1]
        if self.transposed:
            return weights.reshape(*leading, self.inputs, self.outputs).mT
        return weights.reshape(*leading, self.outputs, self.inputs)

    def as_flat(self, rows: Float[Tensor, "*K d q"]) -> Float[Tensor, "*K k"]:
        """The inverse of `as_rows`."""
        return (rows.mT if self.transposed else rows).flatten(-2)

    def spans(self, start: int, stop: int) -> list[tuple[slice, slice, slice]]:
        """Of outputs start … stop−1: which, which entries of h, and where their parameters lie in the flat vector."""
        spans = []
        every, inputs = slice(0, stop - start), slice(0, self.inputs)
        if self.weight is not None and self.transposed:
            # The parameters of one output lie as far from each other as there are outputs.
            for output in range(start, stop):
                where = slice(self.weight.start + output, self.weight.stop, self.outputs)
                spans.append((slice(output - start, output - start + 1), inputs, where))
        elif self.weight is not None:
            first, last = self.weight.start + start * self.inputs, self.weight.start + stop * self.inputs
            spans.append((every, inputs, slice(first, last)))
        if self.bias_start is not None:
            one = slice(self.width - 1, self.width)
            spans.append((every, one, slice(self.bias_start + start, self.bias_start + stop)))
        return spans

    def augmented(self, inputs: Float[Tensor, "*B q"]) -> Float[Tensor, "*B p"]:
        """h: the layer's inputs if its weight is selected, and a one if its bias is."""
        if self.bias is None:
            return inputs
        ones = inputs.new_ones(*inputs.shape[:-1], 1)
        return ones if self.weight is None else torch.cat([inputs, ones], -1)


@dataclass(frozen=True, eq=False)
class LinearTerm:
    """One term V ⊗ hᵀ of the Jacobian of a layer, for B samples; `outer` is None where V is the identity."""

    layer: LinearLayer
    inner: Float[Tensor, "B p"]
    outer: Float[Tensor, "B M d"] | None

    def jacobian(self) -> Float[Tensor, "B M d p"]:
        if self.outer is None:
            identity = torch.eye(self.layer.outputs, dtype=self.inner.dtype, device=self.inner.device)
            return identity[None, :, :, None] * self.inner[:, None, None, :]
        return self.outer[..., None] * self.inner[:, None, None, :]

    def of_rotated(self, rotation: Float[Tensor, "M M"]) -> LinearTerm:
        """This term of the derivative of Qᵀg in place of g."""
        outer = rotation.mT.expand(len(self.inner), -1, -1) if self.outer is None else rotation.mT @ self.outer
        return LinearTerm(self.layer, self.inner, outer)

    def pulled_back(self, vectors: Float[Tensor, "B M"]) -> Float[Tensor, "d p"]:
        """Σ_n v_nᵀ J_n of this term, without forming J."""
        vectors = vectors.to(self.inner.dtype)
        outer = vectors if self.outer is None else torch.einsum("bm,bmd->bd", vectors, self.outer)
        return outer.T @ self.inner

    def to(self, dtype: torch.dtype) -> LinearTerm:
        if self.inner.dtype == dtype and (self.outer is None or self.outer.dtype == dtype):
            return self
        return LinearTerm(self.layer, self.inner.to(dtype), None if self.outer is None else self.outer.to(dtype))


@dataclass(frozen=True)
class Spans:
    """Some entries of the flat parameter vector, as the fewest possible ranges (start, stop)."""

    spans: tuple[tuple[int, int], ...]

    @staticmethod
    def of(selection: Selection, names: Collection[str]) -> Spans:
        """The entries of some of the selected parameters."""
        spans: list[tuple[int, int]] = []
        for name, where in selection.slices().items():
            if name in names and spans and spans[-1][1] == where.start:
                spans[-1] = (spans[-1][0], where.stop)
            elif name in names:
                spans.append((where.start, where.stop))
        return Spans(tuple(spans))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def positions(self, device: torch.device) -> Int[Tensor, "k"]:
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.spans])

    def take(self, vectors: Float[Tensor, "*B n"]) -> Float[Tensor, "*B k"]:
        """These entries of flat vectors."""
        parts = [vectors[..., start:stop] for start, stop in self.spans] or [vectors[..., :0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def put_(self, vectors: Float[Tensor, "*B n"], values: Float[Tensor, "*B k"]) -> None:
        """Set these entries of flat vectors, in place."""
        first = 0
        for start, stop in self.spans:
            vectors[..., start:stop] = values[..., first : first + stop - start]
            first += stop - start

    def index(self, position: int) -> int:
        """Where an entry of the flat vector lies among these entries."""
        offset = 0
        for start, stop in self.spans:
            if start <= position < stop:
                return offset + position - start
            offset += stop - start
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class Patches:
    """How a convolution takes its patches: by (height, width), with `padding` and `mode` of `nn.functional.pad`."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    mode: str

    @staticmethod
    def of(part: nn.Conv1d | nn.Conv2d) -> Patches:
        """A convolution over one dimension is one over images of height one.

        One with a forward of its own pads by itself: what counts is what it convolves (`_model.convolutions`).
        """

        def pair(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (1, *sizes) if len(sizes) == 1 else tuple(sizes)

        mode = "constant" if part.padding_mode == "zeros" else part.padding_mode
        padding = tuple(part._reversed_padding_repeated_twice)
        if has_own_forward(part):
            mode, padding = "constant", (0,) * len(padding)
        return Patches(pair(part.kernel_size), pair(part.stride), pair(part.dilation), padding, mode)

    def images(self, inputs: Float[Tensor, "B c *size"]) -> Float[Tensor, "B c height width"]:
        """The inputs with their padding."""
        padded = F.pad(inputs, self.padding, mode=self.mode) if any(self.padding) else inputs
        return padded[:, :, None] if padded.ndim == 3 else padded

    def unfolded(self, inputs: Float[Tensor, "B c *size"]) -> Float[Tensor, "B T q"]:
        """The patches, each in the order of a row of the weight: channel, height, width."""
        patches: Tensor = F.unfold(self.images(inputs), self.kernel, self.dilation, 0, self.stride)
        return patches.mT

    def columns(self, inputs: Float[Tensor, "B c *size"]) -> Float[Tensor, "q BT"]:
        """The patches of all samples as columns, by one copy for each place of the kernel.

        `unfold` takes one sample after the other, and its columns lie apart: to put those of all samples together
        takes far longer than to make them.
        """
        images = self.images(inputs).transpose(0, 1).contiguous()
        reach = [step * (count - 1) for step, count in zip(self.dilation, self.kernel, strict=True)]
        sizes = [(n - r - 1) // s + 1 for n, r, s in zip(images.shape[2:], reach, self.stride, strict=True)]
        rows = images.new_empty(len(images), self.kernel[0] * self.kernel[1], images.shape[1], *sizes)
        places = product(*(range(0, r + 1, step) for r, step in zip(reach, self.dilation, strict=True)))
        for index, first in enumerate(places):
            down, right = (
                slice(start, start + (n - 1) * s + 1, s) for start, n, s in zip(first, sizes, self.stride, strict=True)
            )
            rows[:, index] = images[:, :, down, right]
        return rows.flatten(2).flatten(0, 1)


@dataclass(frozen=True)
class SharedLayer(LinearLayer):
    """A linear layer, or with `patches` a convolution, whose weight (d, channels, height, width) is d rows of q."""

    patches: Patches | None = None

    def accepts(self, calls: Sequence[Call], size: int) -> bool:
        """Whether it was called, and the first dimension of every input is the samples."""

        def fits(inputs: Tensor) -> bool:
            if inputs.is_nested or inputs.ndim < 2 or len(inputs) != size:
                return False
            return self.patches is None or inputs.ndim == 2 + len(self.patches.padding) // 2

        return bool(calls) and all(fits(call.inputs) for call in calls)

    def inner(self, inputs: Float[Tensor, "B ..."]) -> Float[Tensor, "B T p"]:
        """h_t of one call."""
        if self.patches is not None:
            return self.augmented(self.patches.unfolded(inputs))
        return self.augmented(inputs.reshape(len(inputs), -1, self.inputs))

    def inner_columns(self, inputs: Float[Tensor, "B ..."]) -> Float[Tensor, "p BT"]:
        """h_t of one call as columns, of all samples and uses together."""
        if self.patches is None or self.weight is None:
            return self.inner(inputs).flatten(0, 1).mT
        columns = self.patches.columns(inputs)
        return columns if self.bias is None else torch.cat([columns, columns.new_ones(1, columns.shape[1])])

    def outer_columns(self, derivative: Float[Tensor, "k B ..."]) -> Float[Tensor, "d kBT"]:
        """V_t of one call as columns, from the derivative by its output."""
        if self.patches is not None:
            return derivative.flatten(3).permute(2, 0, 1, 3).flatten(1)
        return derivative.reshape(-1, self.outputs).mT

    def outer(self, derivative: Float[Tensor, "k B ..."]) -> Float[Tensor, "B k d T"]:
        """V_t of one call, from the derivative by its output."""
        if self.patches is not None:
            return derivative.flatten(3).transpose(0, 1)
        k, size = derivative.shape[:2]
        return derivative.reshape(k, size, -1, self.outputs).permute(1, 0, 3, 2)

    def term(self, calls: Sequence[Call], derivatives: Sequence[Tensor] | None) -> SharedTerm:
        """J from all calls of the layer; `derivatives` is None where the layer returns the logits themselves."""
        inner = torch.cat([self.inner(call.inputs) for call in calls], 1)
        if derivatives is None:
            return SharedTerm(self, inner, None)
        outer = torch.cat([self.outer(part) for part in derivatives], 3)
        # Under autocast the output, and the derivative by it, has another dtype than the input.
        return SharedTerm(self, inner, outer).to(torch.promote_types(inner.dtype, outer.dtype))


def shared_layers(network: Network, selection: Selection) -> list[SharedLayer]:
    """Linear layers, and convolutions in one group over one or two dimensions, whose parameters are theirs alone."""
    layers = []
    for name, part, where in own_parameters(network, selection):
        starts = (where.get("weight"), where.get("bias"))
        shape = linear_shape(part)
        if shape is not None:
            layers.append(SharedLayer(name, *shape[:2], *starts, shape[2]))
        elif isinstance(part, (nn.Conv1d, nn.Conv2d)) and part.groups == 1:
            inputs = part.in_channels * int(torch.Size(part.kernel_size).numel())
            layers.append(SharedLayer(name, part.out_channels, inputs, *starts, patches=Patches.of(part)))
    return layers


def gathered(layer: LinearLayer, vectors: Float[Tensor, "*K n"]) -> Float[Tensor, "*K d p"]:
    """The entries of flat vectors that belong to a layer, as (output i, entry a of h)."""
    parts = []
    if layer.weight is not None:
        parts.append(layer.as_rows(vectors[..., layer.weight]))
    if layer.bias is not None:
        parts.append(vectors[..., layer.bias][..., None])
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def scatter_(vectors: Float[Tensor, "*K n"], layer: LinearLayer, values: Float[Tensor, "*K d p"]) -> None:
    """The inverse of `gathered`, in place."""
    if layer.weight is not None:
        vectors[..., layer.weight] = layer.as_flat(values[..., : layer.inputs])
    if layer.bias is not None:
        vectors[..., layer.bias] = values[..., -1]


@dataclass(frozen=True, eq=False)
class SharedTerm:
    """J = Σ_t V_t ⊗ h_tᵀ of one layer, for B samples; `outer` is None where T = 1 and V is the identity.

    Its covariances are for parameters that are independent, with variances v_ia: for T = 1, V diag(Σ_a v_ia h_a²) Vᵀ.
    """

    layer: LinearLayer
    inner: Float[Tensor, "B T p"]
    outer: Float[Tensor, "B M d T"] | None

    def to(self, dtype: torch.dtype) -> SharedTerm:
        return SharedTerm(self.layer, self.inner.to(dtype), None if self.outer is None else self.outer.to(dtype))

    @property
    def is_single(self) -> bool:
        """Whether T = 1."""
        return self.inner.shape[1] == 1

    @staticmethod
    def concatenated(parts: Sequence[SharedTerm]) -> SharedTerm:
        """The samples of several, one after the other."""
        outer = [part.outer for part in parts if part.outer is not None]
        inner = torch.cat([part.inner for part in parts])
        return SharedTerm(parts[0].layer, inner, torch.cat(outer) if outer else None)

    def of_rotated(self, rotation: Float[Tensor, "M M"]) -> SharedTerm:
        """The derivative of Qᵀg in place of g."""
        if self.outer is None:
            outer = rotation.mT[None, :, :, None].expand(len(self.inner), -1, -1, 1)
        else:
            outer = torch.einsum("mk,bmdt->bkdt", rotation, self.outer)
        return SharedTerm(self.layer, self.inner, outer)

    def rotated(self, outer_basis: Float[Tensor, "d d"], inner_basis: Float[Tensor, "p p"]) -> SharedTerm:
        """J for parameters in other bases: W = outer_basis W̃ inner_basisᵀ."""
        if self.outer is None:
            outer = outer_basis[None, :, :, None].expand(len(self.inner), -1, -1, 1)
        elif self.is_single:
            # One product, where the other way there is one with a vector for each sample and class.
            outer = (self.outer[..., 0] @ outer_basis)[..., None]
        else:
            outer = outer_basis.T @ self.outer
        return SharedTerm(self.layer, self.inner @ inner_basis, outer)

    def pieces(self) -> Iterator[tuple[slice, Float[Tensor, "b M d p"]]]:
        """J itself, for some samples at a time."""
        assert self.outer is not None
        size, classes, d, _ = self.outer.shape
        p = self.inner.shape[2]
        limit = JACOBIAN_BYTES.get(self.inner.device.type, 2**25)
        rows = max(1, limit // (classes * d * p * self.inner.element_size()))
        for start in range(0, size, rows):
            part = slice(start, min(start + rows, size))
            products = self.outer[part].flatten(1, 2) @ self.inner[part]
            yield part, products.unflatten(1, (classes, d))

    def jacobian(self) -> Float[Tensor, "B M d p"]:
        if self.outer is None:
            return LinearTerm(self.layer, self.inner[:, 0], None).jacobian()
        return torch.cat([piece for _, piece in self.pieces()])

    def output_variance(self, variances: Float[Tensor, "d p"]) -> Float[Tensor, "B d"]:
        """Var a_i = Σ_a v_ia h_a², of a layer that is used once."""
        return self.inner[:, 0].square() @ variances.T

    def covariance(self, variances: Float[Tensor, "d p"]) -> Float[Tensor, "B M M"]:
        """J diag(v) Jᵀ of each sample."""
        if self.outer is None:
            return torch.diag_embed(self.output_variance(variances))
        if self.is_single:
            half = self.outer[..., 0] * self.output_variance(variances).sqrt()[:, None, :]
            return half @ half.mT
        deviations = variances.sqrt()
        halves = ((piece * deviations).flatten(2) for _, piece in self.pieces())
        return torch.cat([half @ half.mT for half in halves])

    def joint_halves(self, variances: Float[Tensor, "d p"]) -> Iterator[Float[Tensor, "BM d"]]:
        """J diag(√v) of all samples, one row for each logit, the columns of some outputs i or entries a at a time."""
        assert self.outer is not None
        deviations = variances.sqrt()
        if self.is_single:
            outer = self.outer[..., 0].flatten(0, 1)
            inner = self.inner[:, 0].repeat_interleave(self.outer.shape[1], 0)
            for a in range(inner.shape[1]):
                yield outer * (inner[:, a, None] * deviations[:, a])
            return
        outer, p = self.outer, self.inner.shape[2]
        for i in range(outer.shape[2]):
            yield (outer[:, :, i] @ self.inner).reshape(-1, p) * deviations[i]

    def joint_covariance(self, variances: Float[Tensor, "d p"]) -> Float[Tensor, "B M B M"]:
        """J_i diag(v) J_jᵀ of all pairs of samples."""
        if self.is_single:
            h = self.inner[:, 0]
            between = (h[:, None] * h[None, :]) @ variances.T
            if self.outer is None:
                return torch.diag_embed(between).transpose(1, 2)
            V = self.outer[..., 0]
            left = V[:, None] * between[:, :, None, :]
            return (left @ V.mT[None]).transpose(1, 2)
        half = (self.jacobian() * variances.sqrt()).flatten(2).flatten(0, 1)
        size = len(self.inner)
        return (half @ half.T).reshape(size, len(half) // size, size, len(half) // size)


def shared_terms(terms: Sequence[LinearTerm]) -> list[SharedTerm]:
    """The terms of each layer put together."""
    by_layer: dict[LinearLayer, list[LinearTerm]] = {}
    for linear_term in terms:
        by_layer.setdefault(linear_term.layer, []).append(linear_term)
    shared = []
    for layer, layer_terms in by_layer.items():
        outer = [term.outer for term in layer_terms if term.outer is not None]
        inner = torch.stack([term.inner for term in layer_terms], 1)
        shared.append(SharedTerm(layer, inner, torch.stack(outer, 3) if outer else None))
    return shared
