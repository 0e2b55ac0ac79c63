"""Derivatives layer by layer, for structures that need no covariance between layers.

A linear layer or a convolution gives the inputs h_t and the derivatives V_t of its uses (`errbar.shared`); every other
parameter (norm layers, embeddings, convolutions in groups, weights that are used elsewhere too) gives plain Jacobians.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar.capture import Trace, class_seeds, record
from errbar.data import Batch
from errbar.derivative import pulled_back_by_the_whole_model, require_deterministic
from errbar.jacobian import jacobians
from errbar.layers import Selection
from errbar.network import Network
from errbar.shared import Part, SharedFactor, SharedLayer, gathered, scatter_, shared_layers

# What is made of a part of a batch stays within so many bytes.
PART_BYTES = {"cpu": 2**27, "cuda": 2**30}


@dataclass(frozen=True, eq=False)
class LayerwiseDerivative:
    """J of B samples: `factors` of the layers, and the columns `explicit` of all other parameters."""

    n_parameters: int
    factors: tuple[SharedFactor, ...]
    rest: Part
    explicit: Float[Tensor, "B M k"]

    def jacobian(self) -> Float[Tensor, "B M n"]:
        whole = self.explicit.new_zeros(*self.explicit.shape[:2], self.n_parameters)
        for factor in self.factors:
            scatter_(whole, factor.layer, factor.jacobian())
        if len(self.rest):
            whole[..., self.rest.positions(whole.device)] = self.explicit
        return whole

    def to(self, dtype: torch.dtype) -> LayerwiseDerivative:
        factors = tuple(factor.to(dtype) for factor in self.factors)
        return LayerwiseDerivative(self.n_parameters, factors, self.rest, self.explicit.to(dtype))

    @staticmethod
    def concatenated(parts: Sequence[LayerwiseDerivative]) -> LayerwiseDerivative:
        """The samples of several, one after the other."""
        first = parts[0]
        factors = tuple(SharedFactor.concatenated(same) for same in zip(*(part.factors for part in parts), strict=True))
        explicit = torch.cat([part.explicit for part in parts])
        return LayerwiseDerivative(first.n_parameters, factors, first.rest, explicit)


@dataclass(frozen=True)
class LayerwiseRoute:
    """Which layers are taken apart, and which parameters take plain Jacobians.

    `inner_size` and `outer_size` are the numbers that h_t and V_t of one sample and one logit have in all layers.
    """

    n_parameters: int
    n_classes: int
    layers: tuple[SharedLayer, ...]
    rest: Selection
    rest_part: Part
    inner_size: int
    outer_size: int

    @staticmethod
    def plan(network: Network, selection: Selection, batch: Batch) -> LayerwiseRoute:
        """Decide by what the layers are and by what they do with the first samples."""
        few = batch.rows(0, 2)
        require_deterministic(network, few)
        trace, layers = _taken_apart(network, selection, few)
        inner_size = outer_size = 0
        for layer in layers:
            for call in trace.calls[layer.name]:
                uses = call.output[0].numel() // layer.outputs
                inner_size += uses * layer.width
                outer_size += 0 if trace.returns_logits(layer.name) else uses * layer.outputs
        return LayerwiseRoute.of(selection, trace.logits.shape[1], layers, inner_size, outer_size)

    @staticmethod
    def of(
        selection: Selection, n_classes: int, layers: tuple[SharedLayer, ...], inner_size: int, outer_size: int
    ) -> LayerwiseRoute:
        """By the layers that are taken apart; all other parameters take plain Jacobians."""
        covered = {start for layer in layers for start in (layer.weight_start, layer.bias_start)}
        slices = selection.slices()
        every = zip(selection.names, selection.shapes, strict=True)
        shapes = {name: shape for name, shape in every if slices[name].start not in covered}
        return LayerwiseRoute(
            selection.n_parameters,
            n_classes,
            layers,
            Selection(tuple(shapes), tuple(shapes.values())),
            Part.of(selection, shapes),
            inner_size,
            outer_size,
        )

    def chunks(self, batch: Batch, device: torch.device) -> Iterator[Batch]:
        """The batch in parts whose derivatives stay within a fixed number of bytes."""
        return self._parts(batch, device, self.inner_size + self.n_classes * (self.outer_size + len(self.rest_part)))

    def traced(self, network: Network, batch: Batch) -> Iterator[tuple[Batch, Trace]]:
        """The batch in parts, each run through the network, for derivatives of some seeds at a time."""
        numbers = self.inner_size + 2 * self.outer_size + self.n_classes * len(self.rest_part)
        for part in self._parts(batch, network.device, numbers):
            yield part, self._trace(network, part)

    def seeds_at_a_time(self, size: int, device: torch.device) -> int:
        """For how many seeds the derivatives of `size` samples stay within the same number of bytes."""
        return min(self.n_classes, max(1, _bytes(device) // (8 * max(1, size * self.outer_size))))

    def differentiate(self, network: Network, batch: Batch) -> tuple[Float[Tensor, "B M"], LayerwiseDerivative]:
        """The logits of a prepared batch and their derivative, both in the network's own dtype."""
        trace = self._trace(network, batch)
        logits = trace.logits.detach()
        between = [layer.name for layer in self.layers if not trace.returns_logits(layer.name)]
        derivatives = trace.derivatives(between, class_seeds(logits)) if between else {}
        factors = [layer.factor(trace.calls[layer.name], derivatives.get(layer.name)) for layer in self.layers]
        explicit = self.explicit(network, batch, logits)
        return logits, LayerwiseDerivative(self.n_parameters, tuple(factors), self.rest_part, explicit)

    def explicit(self, network: Network, batch: Batch, logits: Float[Tensor, "B M"]) -> Float[Tensor, "B M k"]:
        """The Jacobians by the parameters that no layer holds."""
        if not self.rest.names:
            return logits.new_zeros(*logits.shape, 0)
        return jacobians(network, self.rest, batch)

    def _trace(self, network: Network, batch: Batch) -> Trace:
        trace = record(network, [layer.name for layer in self.layers], batch)
        for layer in self.layers:
            layer.require_accepted(trace.calls[layer.name], len(batch))
        return trace

    def _parts(self, batch: Batch, device: torch.device, numbers: int) -> Iterator[Batch]:
        rows = max(1, _bytes(device) // (8 * max(1, numbers)))
        for start in range(0, len(batch), rows):
            yield batch.rows(start, min(start + rows, len(batch)))


def _bytes(device: torch.device) -> int:
    return PART_BYTES.get(device.type, 2**27)


def _taken_apart(network: Network, selection: Selection, batch: Batch) -> tuple[Trace, tuple[SharedLayer, ...]]:
    """The layers for which one vector-Jacobian product by their uses is what differentiating the whole model gives."""
    layers = shared_layers(network, selection)
    trace = record(network, [layer.name for layer in layers], batch)
    layers = [
        layer
        for layer in layers
        if trace.calls[layer.name] and all(layer.accepts(call, len(batch)) for call in trace.calls[layer.name])
    ]
    vectors, truth, tolerance = pulled_back_by_the_whole_model(network, selection, batch)
    seeds = vectors[None]
    agreeing = []
    for layer in layers:
        name = layer.name
        outer = [seeds] if trace.returns_logits(name) else trace.derivatives([name], seeds)[name]
        made = layer.factor(trace.calls[name], outer).to(torch.float64).jacobian().sum(0)[0]
        expected = gathered(layer, truth)
        # A layer with hardly any derivative is compared on the scale of the others: the rest of it is rounding.
        scale = float(expected.norm()) + 1e-2 * float(truth.norm())
        if float((made - expected).norm()) <= tolerance * scale:
            agreeing.append(layer)
    return trace, tuple(agreeing)
