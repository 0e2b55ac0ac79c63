"""One pass through the network that records the inputs and outputs of some layers, with the graph behind them.

The layers in between may be anything that treats samples independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from errbar._derivative.layers import Call, Variable
from errbar._model.batch import Batch
from errbar._model.convolutions import ConvolutionInputs, has_own_forward
from errbar._model.network import Network
from errbar.errors import ModelError


@dataclass(frozen=True, eq=False)
class Trace:
    """One pass of a batch through the network: the logits, with the graph behind them, and the calls of some layers.

    With `keeps_graph`, derivatives have graphs of their own, which lead to the inputs of the network.
    """

    logits: Float[Tensor, "B M"]
    calls: dict[str, list[Call]]
    keeps_graph: bool = False

    @property
    def values(self) -> Float[Tensor, "B M"]:
        """The logits, without a graph unless that is kept."""
        return self.logits if self.keeps_graph else self.logits.detach()

    def returns_logits(self, name: str) -> bool:
        """Whether the output of a layer's only call are the logits themselves, not overwritten on the way out."""
        if len(self.calls[name]) != 1:
            return False
        (call,) = self.calls[name]
        return call.output is self.logits and call.output._version == call.version

    def derivatives(self, names: Sequence[str], seeds: Float[Tensor, "k B M"]) -> dict[str, list[Tensor]]:
        """∂(Σ_m s_m g_m)/∂a for each call of the layers `names`, a what is differentiated by: (k, …), … as a has it."""
        calls = [call for name in names for call in self.calls[name]]
        gradients = iter(_derivatives(self.logits, calls, seeds, create_graph=self.keeps_graph))
        return {name: [next(gradients) for _ in self.calls[name]] for name in names}


class Seeds(Protocol):
    """Which combinations of the logits are differentiated, in place of each logit by itself."""

    @property
    def count(self) -> int: ...

    def __call__(self, batch: Batch, logits: Float[Tensor, "B M"], /) -> Float[Tensor, "k B M"]: ...


@dataclass(frozen=True)
class TopClasses:
    """The logits of the classes with the largest ones, by themselves, in falling order."""

    count: int

    def __call__(self, batch: Batch, logits: Float[Tensor, "B M"]) -> Float[Tensor, "k B M"]:
        unit = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        return unit[self.classes(logits)].transpose(0, 1)

    def classes(self, logits: Float[Tensor, "B M"]) -> Int[Tensor, "B k"]:
        """Of equal logits, the class that comes first."""
        return logits.argsort(dim=1, descending=True, stable=True)[:, : self.count]


class UnlikeFirstBatchError(ModelError):
    """A layer is not called as it was by the first batch, which decided how it is differentiated."""

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


# From a module, its input and its output: the variable to differentiate by, and what to pass on as the output.
Interception = Callable[[nn.Module, Tensor, Tensor], tuple[Variable, Tensor]]


def _by_output(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Variable, Tensor]:
    """An activation may overwrite its input: the place in the graph stays; a leaf and views need a copy for that."""
    if output.grad_fn is not None and not output._is_view():
        return get_gradient_edge(output), output
    output = output if output.requires_grad else output.detach().requires_grad_()
    return output, output.clone()


def _not_at_all(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Variable, Tensor]:
    return output, output


# A call of a module that does something else than what it derives from.
_UNKNOWN = Call(torch.empty(0), torch.empty(0), torch.empty(0), 0)


def record(
    network: Network, names: Sequence[str], batch: Batch, probes: Mapping[str, Interception] | None = None
) -> Trace:
    """Run the network and record every call of the modules `names` and `probes`.

    The graph starts at the first of them, or where the network keeps graphs, at its inputs.
    """
    replica, keeps_graph = network.replica(), network.keeps_graph
    interceptions: dict[str, Interception] = {**dict.fromkeys(names, _by_output), **(probes or {})}
    calls: dict[str, list[Call]] = {name: [] for name in interceptions}
    modules = dict(replica.named_modules())
    own_ways = {name for name in interceptions if has_own_forward(modules[name])}
    convolutions = ConvolutionInputs()

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            inputs = args[0] if args else next(iter(kwargs.values()))
            if name in own_ways:
                inputs = convolutions.taken(module, output)
                if inputs is None:
                    calls[name].append(_UNKNOWN)
                    return None
            # The graph starts at the first selected layer: what comes before it is not differentiated.
            torch.set_grad_enabled(True)
            # Nested tensors, which transformers make of padded sequences, do not run over the samples: see `accepts`.
            interception = _not_at_all if inputs.is_nested or output.is_nested else interceptions[name]
            inputs = inputs if keeps_graph else inputs.detach()
            variable, next_output = interception(module, inputs, output)
            calls[name].append(Call(inputs, variable, next_output, next_output._version))
            return next_output

        return hook

    # Before hooks of the user, which may change what the layer passes on.
    handles = [
        replica.get_submodule(name).register_forward_hook(note(name), with_kwargs=True, prepend=True)
        for name in interceptions
    ]
    try:
        with torch.set_grad_enabled(keeps_graph), convolutions if own_ways else nullcontext():
            logits = network.logits(batch)
    finally:
        for handle in handles:
            handle.remove()
    return Trace(logits, calls, keeps_graph)


@contextmanager
def quiet_vmap() -> Iterator[None]:
    """Suppress the warning that an operation is mapped over the batch one by one: slow, but correct."""
    switch = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    switch(False)
    try:
        yield
    finally:
        switch(True)


def _derivatives(
    logits: Float[Tensor, "B M"],
    calls: Sequence[Call],
    seeds: Float[Tensor, "k B M"],
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    """One vector-Jacobian product of the whole batch for each seed: (k, …) for each variable."""
    if not calls:
        return []
    if not logits.requires_grad:
        return _zero_where_unused(calls, [None] * len(calls), len(seeds))
    variables: Any = [call.variable for call in calls]
    gradients: Sequence[Tensor | None]
    if len(seeds) == 1:
        # The kernels for a mapped dimension take twice as long, the more so where convolutions have groups.
        alone = torch.autograd.grad(
            logits, variables, seeds[0], allow_unused=True, retain_graph=True, create_graph=create_graph
        )
        gradients = tuple(None if gradient is None else gradient[None] for gradient in alone)
        return _zero_where_unused(calls, gradients, 1)
    try:
        with quiet_vmap():
            gradients = torch.autograd.grad(
                logits,
                variables,
                seeds,
                is_grads_batched=True,
                allow_unused=True,
                retain_graph=True,
                create_graph=create_graph,
            )
    except RuntimeError:
        # An operation without a batching rule: one seed after the other.
        rows = [
            torch.autograd.grad(
                logits, variables, seed, allow_unused=True, retain_graph=True, create_graph=create_graph
            )
            for seed in seeds
        ]
        columns = zip(*rows, strict=True)
        gradients = tuple(None if column[0] is None else torch.stack(column) for column in columns)
    return _zero_where_unused(calls, gradients, len(seeds))


def _zero_where_unused(calls: Sequence[Call], gradients: Sequence[Tensor | None], count: int) -> list[Tensor]:
    def zeros(call: Call) -> Tensor:
        # A place in the graph is that of the output.
        like = call.variable if isinstance(call.variable, Tensor) else call.output
        return like.detach().new_zeros(count, *like.shape)

    return [zeros(call) if gradient is None else gradient for call, gradient in zip(calls, gradients, strict=True)]
