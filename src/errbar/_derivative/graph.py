"""The autograd graph behind the logits of a few samples: on which parameters they depend, and how they end.

Values play no part: what counts is which operations and parameters the graph has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._model.batch import Batch
from errbar._model.network import Network, replicate, run
from errbar.errors import ModelError

# Operations that pass on their input: in another shape or dtype, a part of it, or a mean.
_HANDS_ON = {
    *("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "T", "Transpose", "Permute", "Movedim", "Expand"),
    *("Clone", "Alias", "ToCopy", "torch::autograd::CopyBackwards", "Select", "Slice", "Index", "IndexSelect", "Split"),
    *("Unbind", "AsStrided", "Narrow", "Flip", "Roll", "Clamp", "ClampMin", "ClampMax", "Mean", "Max", "Amax"),
    "MaskedFill",
}
# Operations by which whole numbers enter: what they take from a parameter depends on the input.
_LOOKS_UP = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"}
# Operations whose undifferentiated operand may be a constant as well as the input.
_ELEMENTWISE = {"Mul", "Div", "Add", "Sub", "Rsub", "Pow", "Maximum", "Minimum", "Where", "Lerp", "MaskedFill"}


@dataclass(frozen=True, eq=False)
class Graph:
    """The logits of a few samples with the autograd graph to all floating-point parameters, and the calls of modules.

    `calls` has for each module when its calls began and ended, `ends` when the last one ended, by the numbers that
    autograd gives its nodes.
    """

    logits: Float[Tensor, "B M"]
    leaves: dict[str, Tensor]
    calls: dict[str, list[tuple[int, int]]]
    ends: dict[str, int]

    @staticmethod
    def of(network: Network, batch: Batch) -> Graph:
        replica = replicate(network.module).eval()
        every = network.module.named_parameters()
        leaves = {name: value.detach().requires_grad_() for name, value in every if value.is_floating_point()}
        starts: dict[str, list[int]] = {}
        calls: dict[str, list[tuple[int, int]]] = {}

        def begin(name: str) -> Any:
            def hook(*_: Any) -> None:
                starts.setdefault(name, []).append(_now())

            return hook

        def end(name: str) -> Any:
            def hook(*_: Any) -> None:
                calls.setdefault(name, []).append((starts[name].pop(), _now()))

            return hook

        for name, part in replica.named_modules():
            # Before hooks of the user, which may compute a weight (the older spectral norm).
            part.register_forward_pre_hook(begin(name), prepend=True)
            part.register_forward_hook(end(name))
        with torch.enable_grad():
            logits = network.as_logits(run(replica, batch, leaves), len(batch))
        ends = {name: max(stop for _, stop in spans) for name, spans in calls.items()}
        graph = Graph(logits, leaves, calls, ends)
        if not graph.used():
            raise ModelError(
                "The logits do not depend on any parameter of the model, as far as autograd can tell; expected logits "
                "that can be differentiated. The forward pass may run under torch.no_grad(), or detach() its outputs."
            )
        return graph

    def nodes(self) -> Iterator[Any]:
        """All nodes behind the logits, each once."""
        visited, pending = set(), [self.logits.grad_fn]
        while pending:
            node = pending.pop()
            if node is not None and node not in visited:
                visited.add(node)
                pending += [child for child, _ in node.next_functions]
                yield node

    def uses(self) -> Iterator[tuple[str, int]]:
        """Each use of a parameter on a path to the logits, and its number in the graph."""
        names = {id(leaf): name for name, leaf in self.leaves.items()}
        for node in self.nodes():
            for child, _ in node.next_functions:
                name = names.get(id(getattr(child, "variable", None)))
                if name is not None:
                    yield name, node._sequence_nr()

    def used(self) -> set[str]:
        """The parameters on which the logits depend."""
        return {name for name, _ in self.uses()}

    def places(self, ran: Sequence[Layer]) -> dict[str, int]:
        """For parameters that are used outside the calls of their layers: how many layers had finished before."""
        places: dict[str, int] = {}
        for name, number in self.uses():
            calls = [call for layer in ran if name in layer.parameters for call in self.calls.get(layer.name, [])]
            if not any(start < number < stop for start, stop in calls):
                later_layers = [i for i, layer in enumerate(ran) if self.ends.get(layer.name, -1) > number]
                places[name] = max(min(later_layers, default=len(ran)), places.get(name, 0))
        return places

    def with_derivative(self, names: Sequence[str]) -> set[str]:
        """Those of some parameters by which a random combination of the logits has a derivative other than zero."""
        leaf_names = [name for name in names if name in self.leaves]
        if not leaf_names:
            return set()
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(self.logits.shape, generator=generator).to(self.logits)
        try:
            gradients = torch.autograd.grad(
                self.logits, [self.leaves[name] for name in leaf_names], vectors, retain_graph=True, allow_unused=True
            )
        except RuntimeError as error:
            raise ModelError(
                f"The model cannot be differentiated by its parameters: {error} Expected operations that autograd can "
                "go back through; with activation checkpoints, pass use_reentrant=False."
            ) from error
        return {name for name, gradient in zip(leaf_names, gradients, strict=True) if _has_values(gradient)}

    def beside(self, selected: set[str]) -> set[str]:
        """Parameters that are the first on a path from the logits back to the input, and are not selected.

        A path ends where a value of selected parameters alone comes in, or a matrix of others; scales and shifts of
        others are noted on the path.
        """
        names = {id(leaf): name for name, leaf in self.leaves.items()}
        sources = self._parameters_behind(names)
        neighbours: set[str] = set()
        if sources[self.logits.grad_fn] is not None:
            return neighbours  # where the input comes in is unknown
        visited, pending = set(), [self.logits.grad_fn]
        while pending:
            node = pending.pop()
            if node in visited:
                continue
            visited.add(node)
            fixed = [own for own in map(sources.__getitem__, _children(node)) if own]
            neighbours |= {name for own in fixed for name in own - selected}
            is_end = any(own <= selected or any(self.leaves[name].ndim > 1 for name in own) for own in fixed)
            if not is_end:
                pending += [child for child in _children(node) if sources[child] is None]
        return neighbours

    def _parameters_behind(self, names: Mapping[int, str]) -> dict[Any, frozenset[str] | None]:
        """For each node, the parameters from which its value is computed; None if the input is involved."""
        sources: dict[Any, frozenset[str] | None] = {}
        pending = [self.logits.grad_fn]
        while pending:
            node = pending[-1]
            children = _children(node)
            missing = [child for child in children if child not in sources]
            if missing:
                pending += missing
                continue
            pending.pop()
            variable = id(getattr(node, "variable", None))
            parts = [sources[child] for child in children]
            is_input = len(children) < len(node.next_functions) and _operation(node) not in _ELEMENTWISE  # type: ignore[union-attr]
            has_input = is_input or _operation(node) in _LOOKS_UP or any(part is None for part in parts)
            own = frozenset({names[variable]} if variable in names else ())
            sources[node] = None if has_input else own.union(*(part for part in parts if part is not None))
        return sources


def _now() -> int:
    """The number that autograd would give to a node created now; the numbers grow."""
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.zeros((), requires_grad=True).view(())
        return int(value.grad_fn._sequence_nr())  # type: ignore[union-attr]


def _operation(node: Any) -> str:
    """What a node of autograd differentiates: "Softmax" for SoftmaxBackward0."""
    return re.sub(r"(Backward)?\d*$", "", node.name())


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _origin(node: Any) -> Any:
    """The node behind operations that only pass on their input."""
    while _operation(node) in _HANDS_ON and len(_children(node)) == 1:
        (node,) = _children(node)
    return node


def ending_of(node: Any) -> str:
    """The last operation before a node, by what it does to the values: "Softmax", "LogSoftmax", "Addmm"."""
    node = _origin(node)
    name, children = _operation(node), _children(node)
    if name in ("Cat", "Stack"):
        # The pair (1 − p, p) of a binary classifier is as much a probability as p.
        parts = [_children(child)[0] if _operation(child) == "Rsub" else child for child in children]
        kinds = {ending_of(part) for part in parts}
        return kinds.pop() if len(kinds) == 1 else ""
    if name == "Log":
        below = _origin(children[0])
        # ln(p + ε)
        kinds = {ending_of(part) for part in ([below] if _operation(below) != "Add" else _children(below))}
        return f"Log{kinds.pop()}" if kinds in ({"Softmax"}, {"Sigmoid"}) else name
    return name


def _has_values(gradient: Tensor | None) -> bool:
    if gradient is None:
        return False
    return bool(((gradient.coalesce().values() if gradient.is_sparse else gradient) != 0).any())
