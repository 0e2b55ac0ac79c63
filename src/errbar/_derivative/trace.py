"""Linear layers seen from both sides, so that no Jacobian has to be formed for them.

A linear layer that is used once, with input h (a 1 appended for the bias) and output a = W h, has the Jacobian
    ∂g/∂W = V ⊗ hᵀ,   V = ∂g/∂a  (M × d; the identity for a layer that returns the logits themselves).
`capture` runs the network once, notes h and a on the way, and takes M vector-Jacobian products of the logits for V. The
layers in between may be anything that treats samples independently. A layer that is applied to tokens t has
J = Σ_t V_t ⊗ h_tᵀ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ModelError


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
        found = []
        every, inputs = slice(0, stop - start), slice(0, self.inputs)
        if self.weight is not None and self.transposed:
            # The parameters of one output lie as far from each other as there are outputs.
            for output in range(start, stop):
                where = slice(self.weight.start + output, self.weight.stop, self.outputs)
                found.append((slice(output - start, output - start + 1), inputs, where))
        elif self.weight is not None:
            first, last = self.weight.start + start * self.inputs, self.weight.start + stop * self.inputs
            found.append((every, inputs, slice(first, last)))
        if self.bias_start is not None:
            one = slice(self.width - 1, self.width)
            found.append((every, one, slice(self.bias_start + start, self.bias_start + stop)))
        return found

    def augmented(self, inputs: Float[Tensor, "*B q"]) -> Float[Tensor, "*B p"]:
        """h: what the layer was given, as far as its weight is selected, and a one for its bias."""
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
        return LinearTerm(self.layer, self.inner.to(dtype), None if self.outer is None else self.outer.to(dtype))


@dataclass(frozen=True, eq=False)
class Call:
    """What a layer was given, what the logits are differentiated by, what went on, and the version which that had.

    Differentiated is by the output, of which a copy goes on, or by what a `Interception` has added to it.
    """

    inputs: Tensor
    differentiated: Tensor
    passed_on: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class Trace:
    """One pass of a batch through the network: the logits, with the graph behind them, and the calls of some layers."""

    logits: Float[Tensor, "B M"]
    calls: dict[str, list[Call]]

    def returns_logits(self, name: str) -> bool:
        """Whether the output of a layer's only call are the logits themselves, not overwritten on the way out."""
        if len(self.calls[name]) != 1:
            return False
        (call,) = self.calls[name]
        return call.passed_on is self.logits and call.passed_on._version == call.version

    def derivatives(self, names: Sequence[str], seeds: Float[Tensor, "k B M"]) -> dict[str, list[Tensor]]:
        """∂(Σ_m s_m g_m)/∂a for each call of the layers `names`, a what is differentiated by: (k, …), … as a has it."""
        outputs = [call.differentiated for name in names for call in self.calls[name]]
        gradients = iter(_derivatives(self.logits, outputs, seeds))
        return {name: [next(gradients) for _ in self.calls[name]] for name in names}


class UnlikeFirstBatchError(ModelError):
    """A layer is called in another way than by the first batch, which decided how it is differentiated."""

    @staticmethod
    def of(name: str) -> UnlikeFirstBatchError:
        return UnlikeFirstBatchError(
            f"Layer '{name}' ran with one input for each sample in the first batch and does something else now; "
            "expected a model that computes the same function for every batch."
        )


def class_seeds(logits: Float[Tensor, "B M"]) -> Float[Tensor, "M B M"]:
    """The seeds that give the derivative of each logit by itself."""
    size, classes = logits.shape
    return torch.eye(classes, dtype=logits.dtype, device=logits.device)[:, None, :].expand(classes, size, classes)


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
    found = []
    for name, part, where in own_parameters(network, selection):
        shape = linear_shape(part)
        if shape is not None:
            found.append(LinearLayer(name, *shape[:2], where.get("weight"), where.get("bias"), shape[2]))
    return found


def linear_shape(part: nn.Module) -> tuple[int, int, bool] | None:
    """Outputs, inputs and whether the weight is transposed, of a linear layer; None for what is none.

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


# Of a module, its input and its output: what is to be differentiated by, and what goes on in place of the output.
Interception = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def _by_output(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of the network gets a copy, because an activation may overwrite what it is given."""
    output = output if output.requires_grad else output.detach().requires_grad_()
    return output, output.clone()


def _not_at_all(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    return output, output


def record(
    network: Network, names: Sequence[str], batch: Batch, probes: Mapping[str, Interception] | None = None
) -> Trace:
    """Run the network and note every call of the modules `names` and `probes`; the graph starts at the first."""
    replica = network.replica()
    noted: dict[str, Interception] = {**dict.fromkeys(names, _by_output), **(probes or {})}
    seen: dict[str, list[Call]] = {name: [] for name in noted}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            inputs = args[0] if args else next(iter(kwargs.values()))
            # The graph starts at the first selected layer: what comes before it is not differentiated.
            torch.set_grad_enabled(True)
            # Nested tensors, which transformers make of padded sequences, do not run over the samples: see `accepts`.
            probe = _not_at_all if inputs.is_nested or output.is_nested else noted[name]
            differentiated, passed_on = probe(module, inputs.detach(), output)
            seen[name].append(Call(inputs.detach(), differentiated, passed_on, passed_on._version))
            return passed_on

        return hook

    modules = dict(replica.named_modules())
    # Before hooks of the user, which may change what the layer passes on.
    handles = [modules[name].register_forward_hook(note(name), with_kwargs=True, prepend=True) for name in noted]
    try:
        with torch.no_grad():
            result = network.logits(batch)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(result, seen)


def capture(
    network: Network, layers: Sequence[LinearLayer], batch: Batch
) -> tuple[Float[Tensor, "B M"], dict[str, list[LinearTerm]] | None]:
    """The logits, and the terms V ⊗ hᵀ of each layer: one, or one for each token.

    None in place of the terms when a layer was not called exactly once, or its input does not start with the samples.
    """
    trace = record(network, [layer.name for layer in layers], batch)
    result = trace.logits.detach()
    if any(
        len(calls) != 1 or calls[0].inputs.is_nested or len(calls[0].inputs) != len(result) or calls[0].inputs.ndim < 2
        for calls in trace.calls.values()
    ):
        return result, None
    between = [layer.name for layer in layers if not trace.returns_logits(layer.name)]
    derivatives = trace.derivatives(between, class_seeds(result)) if between else {}
    factors = {}
    for layer in layers:
        derivative = derivatives[layer.name][0] if layer.name in derivatives else None
        factors[layer.name] = _factors(layer, trace.calls[layer.name][0].inputs, derivative)
    # Layers may have other dtypes than each other, and under autocast than their inputs.
    held = [tensor for own in factors.values() for f in own for tensor in (f.inner, f.outer) if tensor is not None]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in held), result.dtype)
    return result, {name: [factor.to(dtype) for factor in own] for name, own in factors.items()}


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Without the warning that an operation is mapped over the batch one by one: it is slow and right."""
    switch = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _derivatives(logits: Float[Tensor, "B M"], outputs: list[Tensor], seeds: Float[Tensor, "k B M"]) -> list[Tensor]:
    """One vector-Jacobian product of the whole batch for each seed: (k, …) for each layer output."""
    if not outputs:
        return []
    if not logits.requires_grad:
        return [a.detach().new_zeros(len(seeds), *a.shape) for a in outputs]
    try:
        with quiet_vmap():
            gradients = torch.autograd.grad(
                logits, outputs, seeds, is_grads_batched=True, allow_unused=True, retain_graph=True
            )
    except RuntimeError:
        # An operation without a batching rule: one seed after the other.
        rows = [torch.autograd.grad(logits, outputs, seed, allow_unused=True, retain_graph=True) for seed in seeds]
        columns = zip(*rows, strict=True)
        gradients = tuple(None if column[0] is None else torch.stack(column) for column in columns)  # type: ignore[misc]
    return [
        a.detach().new_zeros(len(seeds), *a.shape) if gradient is None else gradient
        for a, gradient in zip(outputs, gradients, strict=True)
    ]


def _factors(
    layer: LinearLayer, inputs: Float[Tensor, "B *T q"], derivative: Float[Tensor, "M B *T d"] | None
) -> list[LinearTerm]:
    """One term, or one for each token."""
    inner = layer.augmented(inputs)
    if inner.ndim == 2:
        return [LinearTerm(layer, inner, None if derivative is None else derivative.transpose(0, 1))]
    assert derivative is not None
    tokens = inner.flatten(1, -2)
    outer = derivative.flatten(2, -2).permute(1, 2, 0, 3)
    return [LinearTerm(layer, tokens[:, t], outer[:, t]) for t in range(tokens.shape[1])]
