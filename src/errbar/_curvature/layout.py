"""The layout of a network, from one pass: its layers in order and their sizes, and whether it can be used at all.

Hooks of one pass show which modules run, and their sizes; from the `Layout` that they give, the `Workload` of any
selection of parameters follows without running the network again. The autograd graph of a few samples shows the rest
(`_derivative.graph`): on which parameters the logits depend, where a weight is used outside its module (a functional
head, a tied one), and whether the last operation returns probabilities.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.speed import timed
from errbar._curvature.fisher import Fisher
from errbar._curvature.workload import LayerSize, Workload
from errbar._derivative.columns import GroupedConvolution, NormLayer, grouped_convolutions, norm_layers
from errbar._derivative.full import RANDOM_IN_EVAL
from errbar._derivative.graph import Graph, ending_of
from errbar._derivative.layers import SharedLayer, own_parameters, shared_layers
from errbar._model.batch import Batch
from errbar._model.network import Event, Network, Observation
from errbar._model.selection import NAMED_SETS, Layer, Selection, layers_that_ran, matching, owner, select
from errbar.errors import ModelError, SelectionError

_PROBABILITIES = {"Softmax": "softmax", "Sigmoid": "sigmoid", "Hardsigmoid": "hardsigmoid", "LogSigmoid": "logsigmoid"}
_ODD_FOR_LOGITS = {
    "Exp": "exp",
    "Softplus": "softplus",
    "Relu": "relu",
    "Tanh": "tanh",
    "Hardtanh": "hardtanh",
    "Erf": "erf",
}
_ENDS_IN_PROBABILITIES = (nn.Softmax, nn.Softmax2d, nn.Softmin, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid)
_CHANGES_NOTHING = (nn.Identity, nn.Dropout, nn.Flatten)

# Samples of the first graph, and of the largest.
_FEW, _MOST = 2, 64
# So few samples take as long as many on a GPU: their time says nothing about one.
_FEW_ON_A_GPU = 8
# On a GPU, a number that is read and written takes as long as so many multiplications of a product.
_TOUCHED_PRODUCTS = 50
# How much kernels for different batch sizes may differ, relative to the largest logit.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
_TENSOR_FLOAT = 4e-3


@dataclass(frozen=True, eq=False)
class Layout:
    """What one pass showed: the modules that ran, and their sizes.

    `ran` are the layers that `last_layers` counts: those on which the logits depend, in the order in which they were
    last used. `events` are the calls of modules without children, or with parameters of their own. `layers` are the
    linear layers and convolutions whose parameters are theirs alone, with positions counted in the whole flat vector;
    `uses` how often each was used for one sample, and `calls` how often it was called. `norms` are the norm layers
    whose parameters are theirs alone, `grouped` the convolutions in groups. `seconds` are those of the pass that
    `events` are from, and `sample_seconds` the least that one sample has taken in any pass, infinite where that is not
    known. `inputs` are the numbers that a sample consists of.
    """

    network: Network
    classes: int
    ran: tuple[Layer, ...]
    events: tuple[Event, ...]
    layers: tuple[SharedLayer, ...]
    norms: tuple[NormLayer, ...]
    grouped: tuple[GroupedConvolution, ...]
    uses: dict[str, int]
    calls: dict[str, int]
    returning: frozenset[str]
    seconds: float
    sample_seconds: float
    inputs: int = 0

    @cached_property
    def _slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector of all."""
        return _every(self.network).slices()

    @property
    def n_layers(self) -> int:
        """How many layers with parameters there are: the largest `last_layers`."""
        return len(self.ran)

    @property
    def widest_bytes(self) -> int:
        """Bytes of the largest output of a module, for one sample."""
        itemsize = (self.network.input_dtype or self.network.dtype).itemsize
        return itemsize * max((event.outputs for event in self.events), default=1)

    def last(self, count: int) -> Selection:
        return select(self.network, self.ran, last_layers=count, parameters=None)

    def vectors(self) -> Selection:
        return select(self.network, self.ran, last_layers=None, parameters="vectors")

    def everything(self) -> Selection:
        return select(self.network, self.ran, last_layers=None, parameters="all")

    def timed(self, observation: Observation) -> Layout:
        """The same with the times of another pass: the first one through a network takes longer."""
        modules = {event.module for event in self.events}
        events = tuple(event for event in observation.events if event.module in modules)
        each = observation.seconds / len(observation.logits)
        return replace(self, events=events, seconds=observation.seconds, sample_seconds=min(each, self.sample_seconds))

    def tail(self, selection: Selection) -> Iterator[Event]:
        """The calls from the first selected module on: these are differentiated.

        If a parameter belongs to the model itself, its use may be at the start, so all calls count.
        """
        selected = {owner(name) for name in selection.names}
        is_tail = "" in selected
        for event in self.events:
            is_tail = is_tail or event.module in selected or any(event.module.startswith(f"{s}.") for s in selected)
            if is_tail:
                yield event

    def tail_share(self, selection: Selection) -> float:
        """The share of a pass that the tail takes: of its time, or on a GPU, which runs behind, of its work."""
        tail = list(self.tail(selection))
        start = len(self.events) - len(tail)
        apart = {part.name for part in self.layers} | {part.name for part in self.norms}
        apart |= {part.name for part in self.grouped}
        if tail and tail[0].module in apart:
            # The derivative by the outputs of the first layer does not lead through it.
            start += 1
        if not tail or start == 0:
            return 1.0
        if self.network.device.type == "cuda":
            widths = {layer.name: layer.width for layer in self.layers}
            work = [event.outputs * (widths.get(event.module, 0) + _TOUCHED_PRODUCTS) for event in self.events]
            return sum(work[start:]) / max(1, sum(work))
        return max(0.0, 1 - self.events[start - 1].seconds / max(self.seconds, 1e-9))

    def workload(
        self,
        selection: Selection,
        *,
        batch: int,
        fisher: Fisher,
        dtype: torch.dtype,
        rank: int,
        draws: int = 1000,
        scores: int = 0,
    ) -> Workload:
        """The sizes of a fit of the selected parameters to batches of so many samples."""
        itemsize = (self.network.input_dtype or self.network.dtype).itemsize
        modules: dict[str, int] = {}
        for name, size in zip(selection.names, selection.sizes, strict=True):
            modules[owner(name)] = modules.get(owner(name), 0) + size
        alone = self.alone(selection)
        return Workload(
            modules=tuple(modules.items()),
            tensors=selection.sizes,
            terms=tuple(self._terms(set(selection.names))),
            classes=self.classes,
            scores=scores,
            batch=batch,
            fisher=fisher,
            itemsize=dtype.itemsize,
            network_itemsize=itemsize,
            tail_bytes=itemsize * sum(event.outputs for event in self.tail(selection)),
            device=self.network.device.type,
            rank=rank,
            draws=draws,
            alone=alone.sizes,
            widest=max((event.outputs for event in self.tail(selection)), default=0),
            names=selection.names,
            alone_names=alone.names,
            inputs=self.inputs,
            calls=len(self.events),
        )

    def alone(self, selection: Selection) -> Selection:
        """The selected tensors that no layer holds: their Jacobians are computed one sample at a time."""
        return self._outside(selection, (*self.norms, *self.grouped))

    def without_factors(self, selection: Selection) -> Selection:
        """The selected tensors for which `kron` has no factors, but for those of norms."""
        return self._outside(selection, self.norms)

    def _outside(self, selection: Selection, parts: Sequence[NormLayer | GroupedConvolution]) -> Selection:
        layer_starts = {start for layer in self.layers if layer.name in self.uses for start in _starts(layer)}
        layer_starts |= {start for part in parts for start in _starts(part)}
        every = self._slices
        shapes = zip(selection.names, selection.shapes, strict=True)
        rest = {name: shape for name, shape in shapes if every[name].start not in layer_starts}
        return Selection(tuple(rest), tuple(rest.values()))

    def _terms(self, selected: set[str]) -> Iterator[LayerSize]:
        for layer in self.layers:
            prefix = f"{layer.name}." if layer.name else ""
            part = replace(
                layer,
                weight_start=layer.weight_start if f"{prefix}weight" in selected else None,
                bias_start=layer.bias_start if f"{prefix}bias" in selected else None,
            )
            if part.width and self.uses.get(layer.name):
                plain = layer.patches is None and self.calls[layer.name] == 1
                returns = layer.name in self.returning
                yield LayerSize(layer.name, layer.outputs, part.width, self.uses[layer.name], plain, returns)


def _starts(layer: SharedLayer | NormLayer | GroupedConvolution) -> set[int]:
    """Where the weight and the bias that are its own start in the flat vector."""
    return {start for start in (layer.weight_start, layer.bias_start) if start is not None}


def _every(network: Network) -> Selection:
    parameters = list(network.module.named_parameters())
    return Selection(tuple(name for name, _ in parameters), tuple(tuple(value.shape) for _, value in parameters))


@dataclass(frozen=True, eq=False)
class Inspection:
    """The layout, and the graphs by which a selection is checked; layers in `idle` ran without effect on the logits.

    `ending` is the last operation of the outputs, as autograd calls it: "Addmm", "LogSoftmax".
    """

    network: Network
    batch: Batch
    layout: Layout
    idle: tuple[str, ...]
    ending: str
    graphs: tuple[Graph, ...]

    def require_gauge(self, fisher: str) -> None:
        """Refuse log-probabilities where the shift of the logits matters, which they have lost: with `eta`, and where
        each output is by itself."""
        if self.ending == "LogSoftmax" and not self.network.kind.has_gauge:
            raise ModelError(
                "The model ends in a log-softmax, so its outputs are those of one of several classes; expected the "
                f"logits of a sigmoid each for outputs='{self.network.kind.name}'. Use outputs='classes', or pass the "
                "model without its log-softmax."
            )
        if fisher == "eta" and self.ending == "LogSoftmax":
            raise ModelError(
                "The model ends in a log-softmax, and fisher='eta' depends on the shift of the logits, which that "
                "takes away; expected logits. Pass the model without its log-softmax, or use fisher='ggn', for which "
                "log-probabilities are logits like any other.",
                arguments={"fisher": ("eta", "ggn")},
            )

    def selected(self, *, last_layers: int | None, parameters: str | Sequence[str] | None) -> Selection:
        """The parameters asked for, on which the logits do depend."""
        layers = self.layout.ran
        selection = select(self.network, layers, last_layers=last_layers, parameters=parameters, idle=self.idle)
        self._require_dependence(selection, parameters)
        if last_layers is not None:
            self._warn_of_skipped(selection)
        return selection

    def _require_dependence(self, selection: Selection, parameters: str | Sequence[str] | None) -> None:
        """Refuse parameters whose derivative is exactly zero: all of them, or all under one of the names given."""
        groups: dict[str, set[str]] = {"": set(selection.names)}
        if parameters is not None and parameters not in NAMED_SETS:
            every = dict(self.network.module.named_parameters(remove_duplicate=False))
            first = {id(value): name for name, value in self.network.module.named_parameters()}
            prefixes = [parameters] if isinstance(parameters, str) else list(parameters)
            groups = {name: {first[id(every[match])] for match in matching(list(every), name)} for name in prefixes}
        for name in self._without_derivative(groups):
            subject = f"'{name}'" if name else "any of the selected parameters"
            advice = f" {_listed(self.layout.ran)}" if name else ""
            raise SelectionError(
                f"The logits do not depend on {subject}: their derivative is exactly zero over the first batch. "
                "Expected parameters from which the logits are computed; these may belong to another head, take no "
                "part in the forward pass, or be cut off by detach() or torch.no_grad()."
                f"{advice}"
            )

    def _without_derivative(self, groups: Mapping[str, set[str]]) -> list[str]:
        """The keys of `asked` under which no parameter has a derivative anywhere in the batch."""
        pending = dict(groups)
        for part in _growing(self.batch):
            graph = self.graphs[0] if part is None else Graph.of(self.network, part)
            names = sorted(set().union(*pending.values()))
            with_derivative = graph.with_derivative(names)
            pending = {key: names for key, names in pending.items() if not names & with_derivative}
            if not pending:
                break
        return list(pending)

    def _warn_of_skipped(self, selection: Selection) -> None:
        """Warn about parameters that reach the logits by a path without any selected parameter."""
        skipped_names = set().union(*(graph.beside(set(selection.names)) for graph in self.graphs))
        if skipped_names:
            names = [name for name, _ in self.network.module.named_parameters() if name in skipped_names]
            listing = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            warnings.warn(
                f"The last layers ({', '.join(selection.names[:6])}) leave out parameters that are as close to the "
                f"logits: {listing}. Their uncertainty is not counted; select them by name, with parameters=[...].",
                UserWarning,
                stacklevel=3,
            )


def inspect(network: Network, batch: Batch) -> Inspection:
    """Look at the network with a prepared batch; `ModelError` for a model that cannot be used."""
    observation = network.observed(batch)
    order = observation.order
    graphs = [Graph.of(network, batch.rows(0, _FEW))]
    ending = ending_of(graphs[0].logits.grad_fn)
    _require_logits(network, order, ending)
    sample_seconds = _require_separate_samples(network, batch, observation)
    ran = Layer.all_of(network.module, [name for name, _ in layers_that_ran(network.module, order)])
    for part in _growing(batch):
        # Layers that only some samples reach, as experts do: until each has run, or the batch is over.
        if all(any(layer.name in graph.ends for graph in graphs) for layer in ran):
            break
        if part is not None:
            graphs.append(Graph.of(network, part))
    used_names = set().union(*(graph.used() for graph in graphs))
    places: dict[str, int] = {}
    for graph in graphs:
        for name, place in graph.places(ran).items():
            places[name] = max(place, places.get(name, 0))
    layout = _layout(network, observation, _in_order(network.module, ran, used_names, places), sample_seconds)
    layout = replace(layout, inputs=sum(tensor.numel() for tensor in batch.tensors()) // len(batch))
    idle = tuple(layer.name for layer in ran if not used_names & set(layer.parameters))
    return Inspection(network, batch, layout, idle, ending, tuple(graphs))


def _layout(network: Network, observation: Observation, ran: tuple[Layer, ...], sample_seconds: float) -> Layout:
    every = _every(network)
    leaves = {name for name, part in network.module.named_modules() if not any(part.children())}
    leaves |= {name for name, _, _ in own_parameters(network, every)}
    events = tuple(event for event in observation.events if event.module in leaves)
    calls = Counter(event.module for event in events)
    unlike = observation.unlike
    layers = tuple(layer for layer in shared_layers(network, every) if layer.name not in unlike)
    grouped = (layer for layer in grouped_convolutions(network, every) if layer.name not in unlike)
    outputs = {layer.name: layer.outputs for layer in layers}
    uses: dict[str, int] = {}
    for event in events:
        if event.module in outputs:
            uses[event.module] = uses.get(event.module, 0) + max(1, event.outputs // outputs[event.module])
    return Layout(
        network,
        observation.logits.shape[1],
        ran,
        events,
        layers,
        tuple(norm for norm in norm_layers(network, every) if norm.name in calls),
        tuple(layer for layer in grouped if layer.name in calls),
        uses,
        dict(calls),
        frozenset(name for name in observation.returning if calls[name] == 1),
        observation.seconds,
        sample_seconds,
    )


def _growing(batch: Batch) -> Iterator[Batch | None]:
    """The batch in growing parts; None for the first, whose graph exists already."""
    start, size = _FEW, _FEW
    yield None
    while start < len(batch):
        yield batch.rows(start, min(start + size, len(batch)))
        start, size = start + size, min(2 * size, _MOST)


def _in_order(
    module: nn.Module, ran: Sequence[Layer], used_names: set[str], places: Mapping[str, int]
) -> tuple[Layer, ...]:
    """The layers on which the logits depend: modules that ran, and weights that are used without their module.

    A weight that is used after the call of its module moves its layer there. One whose module never ran is a layer by
    itself, with the other parameters of its owner that are used at that place; scales, temperatures and other
    parameters of one dimension are not layers.
    """
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    matrices = {name for name, shape in shapes.items() if sum(size > 1 for size in shape) > 1}
    positions: list[tuple[int, Layer]] = []
    for index, layer in enumerate(ran):
        later_places = [places[name] for name in layer.parameters if name in places and name in matrices]
        if used_names & set(layer.parameters):
            positions.append((max([index, *later_places]), layer))
    module_parameters = {name for layer in ran for name in layer.parameters}
    alone: dict[tuple[int, str], list[str]] = {}
    for name in shapes:
        if name in places and name not in module_parameters:
            alone.setdefault((places[name], owner(name)), []).append(name)
    for (place, _), names in alone.items():
        if matrices & set(names):
            positions.append((place, Layer(" and ".join(names), tuple(names))))
    # A weight at the place of a module was used before that finished; beyond the last place, after all modules.
    return tuple(layer for _, layer in sorted(positions, key=lambda entry: (entry[0], entry[1] in ran)))


def _require_logits(network: Network, order: Sequence[str], ending: str) -> None:
    """Refuse outputs that are probabilities, and warn about last operations that logits do not come from."""
    if ending in _PROBABILITIES:
        modules = dict(network.module.named_modules())
        leaves = [name for name in order if not any(modules[name].children())]
        while leaves and isinstance(modules[leaves[-1]], _CHANGES_NOTHING):
            leaves.pop()
        if leaves and isinstance(modules[leaves[-1]], _ENDS_IN_PROBABILITIES):
            kind = type(modules[leaves[-1]]).__name__
            raise ModelError(
                f"The model ends in a {kind} ('{leaves[-1]}'), so it returns probabilities; expected logits. Pass the "
                f"model without its {kind}."
            )
        kind = _PROBABILITIES[ending]
        raise ModelError(
            f"The model's outputs come from a {kind}, so they are probabilities; expected logits. Return the input of "
            f"the {kind} from forward(), or pass a module that does."
        )
    if ending in _ODD_FOR_LOGITS:
        kind = _ODD_FOR_LOGITS[ending]
        warnings.warn(
            f"The model's outputs come from {kind}, which is unusual for logits; errbar takes their softmax all the "
            f"same. If the model was not trained with that softmax, return the input of the {kind}.",
            UserWarning,
            stacklevel=2,
        )


def _require_separate_samples(network: Network, batch: Batch, observation: Observation) -> float:
    """Refuse a model whose result for one input depends on the others: a batch is compared with its first half.

    Kernels differ with the size of a batch. So a difference beyond rounding must also appear in a batch of the same
    size with other samples in its second half.

    The pass of the half is the second one through the network, so its time counts: returns the seconds of a sample.
    """
    logits = observation.logits
    size, half = len(batch), len(batch) // 2
    if half == 0:
        return math.inf
    is_few = network.device.type == "cuda" and half < _FEW_ON_A_GPU
    kinds = [p.dtype for p in network.module.parameters() if p.is_floating_point()]
    rounding = max(_ROUNDING.get(kind, 4 * torch.finfo(kind).eps) for kind in [*kinds, logits.dtype])
    if network.device.type == "cuda" and rounding < _TENSOR_FLOAT and torch.float64 not in kinds:
        rounding = _TENSOR_FLOAT
    reference = logits[:half]

    def differs(other: Float[Tensor, "k M"]) -> bool:
        return bool(((other[:half] - reference).abs() > rounding * reference.abs().amax()).any())

    halved, seconds = timed(lambda: network.logits(batch.rows(0, half)), network.device)
    sample_seconds = math.inf if is_few else min(seconds / half, observation.seconds / size)
    if not differs(halved):
        return sample_seconds
    if differs(network.logits(batch)):
        raise ModelError(RANDOM_IN_EVAL)

    def with_another_end(value: Tensor) -> Tensor:
        return torch.cat([value[:half], value[:1].expand(size - half, *value.shape[1:])]) if _runs(value) else value

    def _runs(value: Tensor) -> bool:
        return value.ndim > 0 and len(value) == size

    if differs(network.logits(batch.map(with_another_end))):
        raise ModelError(
            "The model mixes samples: its logits for the first half of a batch differ from those in the whole batch, "
            "so one input's result depends on the others. Expected a model that treats samples independently; replace "
            "what is computed over the batch (a mean, a batch norm in training mode) by fixed numbers."
        )
    return sample_seconds


def _listed(layers: Sequence[Layer]) -> str:
    names = [layer.name or "(the model itself)" for layer in layers[-6:]]
    more = f"{len(layers) - 6} more and " if len(layers) > 6 else ""
    return f"The logits depend on {more}{', '.join(names)}."
