"""One pass of a few samples through the network, noting what its layers are and how large, and how long they take.

From a `Layout` the `Workload` of any selection of parameters follows without running the network again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from errbar._curvature.fisher import Fisher
from errbar._curvature.workload import LayerSize, Workload
from errbar._derivative.norms import NormLayer, norm_layers
from errbar._derivative.shared import SharedLayer, shared_layers
from errbar._derivative.trace import own_parameters
from errbar._model.batch import Batch
from errbar._model.network import Network, as_logits, replicate, run
from errbar._model.selection import Layer, Selection, owner, select


@dataclass(frozen=True)
class Event:
    """A module without children ran: its numbers of input and output for one sample, and when it had finished."""

    module: str
    inputs: int
    outputs: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Layout:
    """What one pass showed: what ran, and how large it is.

    `ran` are the layers that `last_layers` counts, in order. `layers` are the linear layers and convolutions whose
    parameters are theirs alone, with positions counted in the whole flat vector; `uses` how often each was used for one
    sample, and `calls` how often it was called. `norms` are the norm layers whose parameters are theirs alone.
    """

    network: Network
    classes: int
    ran: tuple[Layer, ...]
    events: tuple[Event, ...]
    layers: tuple[SharedLayer, ...]
    norms: tuple[NormLayer, ...]
    uses: dict[str, int]
    calls: dict[str, int]
    returning: frozenset[str]
    seconds: float

    @property
    def n_layers(self) -> int:
        """How many layers with parameters there are: the largest `last_layers`."""
        return len(self.ran)

    def last(self, count: int) -> Selection:
        return select(self.network, self.ran, last_layers=count, parameters=None)

    def everything(self) -> Selection:
        return select(self.network, self.ran, last_layers=None, parameters="all")

    def tail(self, selection: Selection) -> Iterator[Event]:
        """What ran from the first selected module on: that is what is differentiated.

        Where a parameter belongs to the model itself, nothing tells when it is used: perhaps at once.
        """
        selected = {owner(name) for name in selection.names}
        started = "" in selected
        for event in self.events:
            started = started or event.module in selected or any(event.module.startswith(f"{s}.") for s in selected)
            if started:
                yield event

    def tail_share(self, selection: Selection) -> float:
        """The share of the time of a pass that the tail takes."""
        tail = list(self.tail(selection))
        if not tail or len(tail) == len(self.events):
            return 1.0
        return 1 - self.events[len(self.events) - len(tail) - 1].seconds / max(self.seconds, 1e-9)

    def workload(
        self, selection: Selection, *, batch: int, fisher: Fisher, dtype: torch.dtype, rank: int, draws: int = 1000
    ) -> Workload:
        """The sizes of a fit of the selected parameters to batches of so many samples."""
        itemsize = (self.network.input_dtype or self.network.dtype).itemsize
        modules: dict[str, int] = {}
        for name, size in zip(selection.names, selection.sizes, strict=True):
            modules[owner(name)] = modules.get(owner(name), 0) + size
        return Workload(
            modules=tuple(modules.items()),
            tensors=selection.sizes,
            terms=tuple(self._terms(set(selection.names))),
            classes=self.classes,
            batch=batch,
            fisher=fisher,
            itemsize=dtype.itemsize,
            network_itemsize=itemsize,
            tail_bytes=itemsize * sum(event.outputs for event in self.tail(selection)),
            device=self.network.device.type,
            rank=rank,
            draws=draws,
            alone=self.alone(selection).sizes,
            widest=max((event.outputs for event in self.tail(selection)), default=0),
        )

    def alone(self, selection: Selection) -> Selection:
        """The selected tensors that neither a layer nor a norm layer holds."""
        together = {start for layer in self.layers if layer.name in self.uses for start in _starts(layer)}
        together |= {start for norm in self.norms for start in _starts(norm)}
        every = _every(self.network).slices()
        shapes = zip(selection.names, selection.shapes, strict=True)
        kept = {name: shape for name, shape in shapes if every[name].start not in together}
        return Selection(tuple(kept), tuple(kept.values()))

    def _terms(self, selected: set[str]) -> Iterator[LayerSize]:
        for layer in self.layers:
            prefix = f"{layer.name}." if layer.name else ""
            own = replace(
                layer,
                weight_start=layer.weight_start if f"{prefix}weight" in selected else None,
                bias_start=layer.bias_start if f"{prefix}bias" in selected else None,
            )
            if own.width and self.uses.get(layer.name):
                plain = layer.patches is None and self.calls[layer.name] == 1
                returns = layer.name in self.returning
                yield LayerSize(layer.name, layer.outputs, own.width, self.uses[layer.name], plain, returns)


def layout_of(network: Network, batch: Batch, ran: tuple[Layer, ...], *, samples: int = 2) -> Layout:
    """Run the first samples of a prepared batch through the network once; `ran` are its layers in order."""
    few = batch.rows(0, min(samples, len(batch)))
    size = len(few)
    replica = replicate(network.module).eval()
    modules = dict(replica.named_modules())
    events: list[Event] = []
    returned: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    leaves = {name for name, part in modules.items() if not any(part.children())}
    leaves |= {name for name, _, _ in own_parameters(network, _every(network))}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if name in leaves:
                calls[name] = calls.get(name, 0) + 1
                seconds = time.perf_counter() - start
                events.append(Event(name, _numbers(args) // size, _numbers((output,)) // size, seconds))
                if isinstance(output, Tensor):
                    returned[name] = output

        return hook

    for name, part in modules.items():
        part.register_forward_hook(note(name))
    start = time.perf_counter()
    result = run(replica, few)
    seconds = time.perf_counter() - start
    logits = as_logits(result, size, network.output)
    layers = tuple(shared_layers(network, _every(network)))
    outputs = {layer.name: layer.outputs for layer in layers}
    uses: dict[str, int] = {}
    for event in events:
        if event.module in outputs:
            uses[event.module] = uses.get(event.module, 0) + max(1, event.outputs // outputs[event.module])
    returning = frozenset(name for name, output in returned.items() if output is logits and calls[name] == 1)
    norms = tuple(norm for norm in norm_layers(network, _every(network)) if norm.name in calls)
    return Layout(network, logits.shape[1], ran, tuple(events), layers, norms, uses, calls, returning, seconds)


def _starts(layer: SharedLayer | NormLayer) -> set[int]:
    """Where the weight and the bias that are its own start in the flat vector."""
    return {start for start in (layer.weight_start, layer.bias_start) if start is not None}


def _every(network: Network) -> Selection:
    named = list(network.module.named_parameters())
    return Selection(tuple(name for name, _ in named), tuple(tuple(value.shape) for _, value in named))


def _numbers(values: tuple[Any, ...]) -> int:
    return sum(value.numel() for value in values if isinstance(value, Tensor))
