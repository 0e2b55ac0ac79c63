"""The network as one graph of elementary operations, and the way back from its logits to the selected layers.

No automatic differentiation is left in an exported graph, so V = ∂g/∂a of each selected layer is written out. From the
logits backwards every operation has one input, and a rule:
    linear layer, a = W h + b      V ← V W
    activation, a = φ(z)           V ← V diag φ′(z)
Before the first selected layer, anything that `torch.export` supports is allowed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node

from errbar._derivative.layers import LinearLayer
from errbar._model.batch import Batch
from errbar._model.network import Network, Output, picked, replicate
from errbar.errors import ExportError

aten = torch.ops.aten

Slope = Callable[[Tensor], Tensor]

_DIFFERENTIATED = (
    "linear layers, ReLU, ReLU6, LeakyReLU, ELU, Tanh, Sigmoid, SiLU, GELU, Softplus, Hardtanh, Dropout, Identity, "
    "Flatten, and sums and products with numbers"
)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer on the way back: which values are its input and its weight; `layer` if it is selected."""

    layer: LinearLayer | None
    inputs: int
    weight: int


@dataclass(frozen=True, eq=False)
class Elementwise:
    """An activation on the way back: which value is its input, and φ′."""

    inputs: int
    slope: Slope


Step = Linear | Elementwise


@dataclass(frozen=True, eq=False)
class LayerTerm:
    """V ⊗ hᵀ of one layer for B inputs; `outer` is None where V is the identity, and (M, d) where it is constant."""

    layer: LinearLayer
    inner: Float[Tensor, "B p"]
    outer: Float[Tensor, "*B M d"] | None

    def covariance(self, inside: Float[Tensor, "B d e"], other: LayerTerm) -> Float[Tensor, "B M M"]:
        """V Q V'ᵀ."""
        half = inside if self.outer is None else self.outer @ inside
        return half if other.outer is None else half @ other.outer.mT


class ChainedNetwork(nn.Module):
    """The network's graph, which returns the logits and the values that the steps back from them need."""

    def __init__(
        self, graph: GraphModule, state: Sequence[Tensor], places: Sequence[int], steps: Sequence[Step], columns: int
    ) -> None:
        super().__init__()
        self.graph = graph
        self.columns = columns
        self.places = tuple(places)
        self.steps = tuple(steps)
        for index, tensor in enumerate(state):
            self.register_buffer(f"weight_{index}", tensor)

    def forward(self, *inputs: Tensor) -> tuple[Float[Tensor, "B c"], list[Tensor]]:
        """The network's output as it is, and the values."""
        rest, state = iter(inputs), iter(self.buffers(recurse=False))
        output, *values = self.graph(*(next(state) if place < 0 else next(rest) for place in self.places))
        return output, values

    def terms(
        self, values: Sequence[Tensor], start: Float[Tensor, "M c"] | None, dtype: torch.dtype
    ) -> list[LayerTerm]:
        """The terms of the selected layers, the last first; V begins as `start`, None for the identity."""
        outer: Tensor | None = start
        terms = []
        for step in self.steps:
            inputs = values[step.inputs].to(dtype)
            if isinstance(step, Elementwise):
                slope = step.slope(inputs)
                identity = torch.eye(slope.shape[1], dtype=dtype)
                outer = (identity if outer is None else outer) * slope[:, None, :]
                continue
            if step.layer is not None:
                terms.append(LayerTerm(step.layer, step.layer.augmented(inputs), outer))
            weight = values[step.weight].to(dtype)
            outer = weight if outer is None else outer @ weight
        return terms


class _Output(nn.Module):
    """The model with its logits as the only output."""

    def __init__(self, module: nn.Module, output: Output) -> None:
        super().__init__()
        self.module = module
        self.output = output

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Float[Tensor, "B c"]:
        output = picked(self.module(*args, **kwargs), self.output)
        logits: Tensor = getattr(output, "logits", output)
        return logits


def named_inputs(batch: Batch) -> dict[str, Tensor]:
    """The inputs of a graph by name: "x", "x_2", …, or the names that the model is called with."""
    places = {"x" if place == 1 else f"x_{place}": value for place, value in enumerate(batch.args, start=1)}
    return places | batch.kwargs


@dataclass(frozen=True, eq=False)
class Sample:
    """Two rows to make a graph with, and the names of the inputs that have one entry per row; others are constant."""

    batch: Batch
    free: frozenset[str]

    @staticmethod
    def of(batch: Batch) -> Sample:
        """Two rows, because a batch of one would fix the size; and zeros, because the file keeps its example."""
        size = len(batch)
        free = (name for name, t in named_inputs(batch).items() if t.ndim > 0 and t.shape[0] == size)
        two = batch.map(lambda t: t.new_zeros(2, *t.shape[1:]) if t.ndim > 0 and t.shape[0] == size else t)
        return Sample(two, frozenset(free))


def exported(module: nn.Module, sample: Sample) -> ExportedProgram:
    """A graph of the module in which the number of rows is free, and everything else as it is in the sample."""
    batch, inputs = sample.batch, named_inputs(sample.batch)
    free = torch.export.Dim("batch")
    shapes = {name: {0: free} if name in sample.free else {} for name in inputs}
    forward = module.forward

    def with_names(*args: Tensor, **kwargs: Tensor) -> Any:
        return forward(*args, **kwargs)

    # torch.export reads names from the signature, and cannot have free sizes in what comes as **kwargs.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    with_names.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])  # type: ignore[attr-defined]
    module.forward = with_names
    return torch.export.export(module, batch.args, batch.kwargs, dynamic_shapes=shapes, strict=False)


def chained(network: Network, layers: Sequence[LinearLayer], sample: Sample) -> ChainedNetwork:
    """The network as a graph whose batch size is free, with the steps back to the selected `layers`."""
    module = _Output(replicate(network.module).eval(), network.output)
    try:
        # Without operations in place, which would overwrite values that the way back needs.
        program = exported(module, sample).run_decompositions({})
    except Exception as error:
        raise ExportError(
            f"torch.export cannot make a graph of the model for any batch size: {_first_line(error)} Expected a model "
            "whose forward does not depend on the values or the number of its inputs."
        ) from error
    signature = program.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise ExportError(
            "The model changes its buffers or its inputs when it runs; expected one that leaves them unchanged."
        )
    names = {f"{layer.name}.weight" if layer.name else "weight": layer for layer in layers}
    weights = {
        node: names.get(target.removeprefix("module."))
        for node, target in (signature.inputs_to_parameters | signature.inputs_to_buffers).items()
    }
    output = program.graph.output_node()
    (logits,) = output.args[0]
    steps, values = _way_back(logits, weights, list(layers))
    output.args = ((logits, *values),)
    program.graph_module.recompile()
    state, places = [], []
    for spec in signature.input_specs:
        if spec.kind == InputKind.USER_INPUT:
            places.append(0)
            continue
        source = program.state_dict if spec.target in program.state_dict else program.constants
        value = source.get(spec.target or "")
        if not isinstance(value, Tensor):
            raise ExportError(f"The model holds '{spec.target}', which is not a tensor and cannot be exported.")
        state.append(value.detach())
        places.append(-1)
    return ChainedNetwork(program.graph_module, state, places, steps, int(logits.meta["val"].shape[1]))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".") + "."


def _way_back(
    node: Node, weights: dict[str, LinearLayer | None], missing: list[LinearLayer]
) -> tuple[list[Step], list[Node]]:
    """The steps from the logits to the first selected layer, and the values that they need."""
    steps: list[Step] = []
    places: dict[Node, int] = {}

    def value(value_node: Node) -> int:
        return places.setdefault(value_node, len(places))

    while missing:
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, Node) or _dimensions(node) != 2:
            raise _refused(node, missing)
        if node.target is aten.linear.default:
            weight = node.args[1]
            if not isinstance(weight, Node) or weight.name not in weights:
                raise _refused(node, missing)
            layer = weights[weight.name]
            if layer is not None and len(weight.users) > 1:
                raise ExportError(f"The weight of '{layer.name}' is used more than once; expected one use of it.")
            steps.append(Linear(layer, value(source), value(weight)))
            missing = [other for other in missing if other is not layer]
        elif not _changes_nothing(node, source):
            slope = _slope(node)
            if slope is None:
                raise _refused(node, missing)
            steps.append(Elementwise(value(source), slope))
        node = source
    return steps, list(places)


def _dimensions(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, Tensor) else None


def _refused(node: Node, missing: list[LinearLayer]) -> ExportError:
    names = ", ".join(f"'{layer.name}'" for layer in missing)
    what = str(node.target) if node.op == "call_function" else "nothing more"
    return ExportError(
        f"On the way back from the logits to the selected layers ({names}) the model has {what}, whose derivative an "
        f"exported graph cannot take. Expected, for inputs of shape (batch, features), {_DIFFERENTIATED}. Fit the "
        "layers after it only (last_layers=1), or serve posterior.predict.",
        arguments={"last_layers": 1},
    )


def _changes_nothing(node: Node, source: Node) -> bool:
    if node.target in (aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default):
        return _argument(node, 2, "train", True) is False
    if node.target in (aten.view.default, aten.reshape.default, aten.flatten.using_ints):
        before, after = source.meta["val"].shape, node.meta["val"].shape
        return len(before) == 2 and bool(before[1] == after[1])
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return isinstance(node.args[1], (int, float))
    copies = (
        aten.alias.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.detach.default,
        aten.detach_.default,
    )
    return node.target in copies


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _slope(node: Node) -> Slope | None:
    """φ′ of an elementwise operation; None if there is no rule for it."""
    if node.target in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], (int, float)):
        factor = node.args[1] if node.target is aten.mul.Tensor else 1 / node.args[1]
        return lambda z: torch.full_like(z, factor)
    if node.target is aten.neg.default:
        return lambda z: torch.full_like(z, -1.0)
    if node.target is aten.relu.default:
        return lambda z: (z > 0).to(z.dtype)
    if node.target is aten.leaky_relu.default:
        slope = float(_argument(node, 1, "negative_slope", 0.01))
        return lambda z: torch.where(z > 0, torch.ones_like(z), slope)
    if node.target is aten.hardtanh.default:
        low, high = float(_argument(node, 1, "min_val", -1.0)), float(_argument(node, 2, "max_val", 1.0))
        return lambda z: ((z > low) & (z < high)).to(z.dtype)
    if node.target is aten.relu6.default:
        return lambda z: ((z > 0) & (z < 6)).to(z.dtype)
    if node.target is aten.elu.default:
        alpha, scale, inner = (_argument(node, i + 1, ("alpha", "scale", "input_scale")[i], 1.0) for i in range(3))
        return lambda z: scale * torch.where(z > 0, torch.ones_like(z), alpha * inner * torch.exp(inner * z))
    if node.target is aten.tanh.default:
        return lambda z: 1 - torch.tanh(z).square()
    if node.target is aten.sigmoid.default:
        return lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z))
    if node.target is aten.silu.default:
        return lambda z: torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))
    if node.target is aten.softplus.default:
        beta, threshold = float(_argument(node, 1, "beta", 1.0)), float(_argument(node, 2, "threshold", 20.0))
        # Above the threshold torch uses the identity instead.
        return lambda z: torch.where(beta * z > threshold, torch.ones_like(z), torch.sigmoid(beta * z))
    if node.target is aten.gelu.default:
        return _gelu_by_tanh if _argument(node, 1, "approximate", "none") == "tanh" else _gelu
    return None


def _gelu(z: Tensor) -> Tensor:
    """d/dz z Φ(z) = Φ(z) + z φ(z), with the distribution and the density of a standard normal variable."""
    return 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def _gelu_by_tanh(z: Tensor) -> Tensor:
    """The derivative of ½ z (1 + tanh u), u = √(2/π) (z + 0.044715 z³)."""
    root = math.sqrt(2 / math.pi)
    t = torch.tanh(root * (z + 0.044715 * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t.square()) * root * (1 + 3 * 0.044715 * z.square())
