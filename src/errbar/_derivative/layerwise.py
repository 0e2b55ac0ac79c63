"""Derivatives layer by layer, from one pass through the network and one backward pass for each logit.

A linear layer or a convolution gives the inputs h_t and the derivatives V_t of its uses (`_derivative.layers`), a norm
layer or a convolution in groups its Jacobian (`_derivative.columns`); every other parameter (embeddings, weights that
are also used elsewhere) gives plain Jacobians, one sample at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._derivative.columns import GroupedConvolution, NormLayer, grouped_convolutions, norm_layers
from errbar._derivative.full import each_by_itself, pulled_back_by_the_whole_model, require_deterministic, rounding_of
from errbar._derivative.layers import SharedLayer, SharedTerm, Spans, gathered, scatter_, shared_layers
from errbar._derivative.trace import Seeds, Trace, UnlikeFirstBatchError, class_seeds, record
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection

_PART_BYTES, _MOST_PART_BYTES = 2**27, 2**32
# On a CPU, pieces of memory above this (glibc's largest mmap threshold) go back to the system each time, and come back
# page by page: EfficientNet-Lite0 takes half as long again for a sample of sixteen as for one of four.
_KEPT_PIECE_BYTES = 2**25
# A backward pass that is mapped over seeds has pieces as large for each of them, and copies each from one seed's after
# the other where an operation has no kernel for all: ResNet-20 takes twice as long with pieces of 64 MiB as of 16.
_MAPPED_PIECE_BYTES = 2**24


@dataclass(frozen=True, eq=False)
class LayerwiseDerivative:
    """J of B samples: `terms` of the layers, and the columns `explicit` of all other parameters."""

    n_parameters: int
    terms: tuple[SharedTerm, ...]
    rest: Spans
    explicit: Float[Tensor, "B M k"]

    def jacobian(self) -> Float[Tensor, "B M n"]:
        if not self.terms:
            return self.explicit
        whole = self.explicit.new_zeros(*self.explicit.shape[:2], self.n_parameters)
        for term in self.terms:
            scatter_(whole, term.layer, term.jacobian())
        self.rest.put_(whole, self.explicit)
        return whole

    def of_rotated(self, rotation: Float[Tensor, "M M"]) -> LayerwiseDerivative:
        """The derivative of Qᵀg in place of g: contrasts have their own digits beside a common shift."""
        terms = tuple(term.of_rotated(rotation) for term in self.terms)
        return LayerwiseDerivative(self.n_parameters, terms, self.rest, rotation.mT @ self.explicit)

    def to(self, dtype: torch.dtype) -> LayerwiseDerivative:
        terms = tuple(term.to(dtype) for term in self.terms)
        return LayerwiseDerivative(self.n_parameters, terms, self.rest, self.explicit.to(dtype))

    @staticmethod
    def concatenated(parts: Sequence[LayerwiseDerivative]) -> LayerwiseDerivative:
        """The samples of several, one after the other."""
        first = parts[0]
        if any(len(part.terms) != len(first.terms) for part in parts):
            whole = torch.cat([part.jacobian() for part in parts])
            return LayerwiseDerivative(first.n_parameters, (), Spans(((0, first.n_parameters),)), whole)
        terms = tuple(SharedTerm.concatenated(group) for group in zip(*(part.terms for part in parts), strict=True))
        explicit = torch.cat([part.explicit for part in parts])
        return LayerwiseDerivative(first.n_parameters, terms, first.rest, explicit)


@dataclass(frozen=True)
class LayerwiseRoute:
    """Which layers are taken apart, which norms give Jacobians with them, and which parameters (`rest`) go alone.

    `grouped` are the convolutions in groups. `rest_spans` are the parameters of the norms, of these and of the rest
    together, `rest_starts` where the last begin in the flat vector. `inner_size` and `outer_size` are the numbers that
    h_t and V_t of one sample and one logit have in all layers, the latter with those of the widest derivative on the
    way back, which `widest` has alone; 0 where that is not known.
    """

    n_parameters: int
    n_classes: int
    layers: tuple[SharedLayer, ...]
    norms: tuple[NormLayer, ...]
    rest: Selection
    rest_starts: tuple[int, ...]
    rest_spans: Spans
    inner_size: int
    outer_size: int
    grouped: tuple[GroupedConvolution, ...] = ()
    widest: int = 0

    @staticmethod
    def plan(network: Network, selection: Selection, batch: Batch) -> LayerwiseRoute:
        """Decide by what the layers are and by what they do with the first samples."""
        few = batch.rows(0, 2)
        require_deterministic(network, few)
        trace, layers, columns = _taken_apart(network, selection, few)
        inner_size = outer_size = widest = 0
        for layer in layers:
            for call in trace.calls[layer.name]:
                numbers = call.output[0].numel()
                inner_size += numbers // layer.outputs * layer.width
                if not trace.returns_logits(layer.name):
                    outer_size, widest = outer_size + numbers, max(widest, numbers)
        for part in columns:
            widest = max(widest, *(call.output[0].numel() for call in trace.calls[part.name]))
        outer_size += widest
        norms = tuple(part for part in columns if isinstance(part, NormLayer))
        grouped = tuple(part for part in columns if isinstance(part, GroupedConvolution))
        classes = trace.logits.shape[1]
        return LayerwiseRoute.of(selection, classes, layers, norms, grouped, (inner_size, outer_size, widest))

    @staticmethod
    def of(
        selection: Selection,
        n_classes: int,
        layers: tuple[SharedLayer, ...],
        norms: tuple[NormLayer, ...] = (),
        grouped: tuple[GroupedConvolution, ...] = (),
        sizes: tuple[int, int, int] = (0, 0, 0),
    ) -> LayerwiseRoute:
        """By the layers that are taken apart, and `inner_size`, `outer_size` and `widest`; all other parameters take
        plain Jacobians."""
        starts = {name: where.start for name, where in selection.slices().items()}
        layer_starts = {start for layer in layers for start in (layer.weight_start, layer.bias_start)}
        with_columns: tuple[NormLayer | GroupedConvolution, ...] = (*norms, *grouped)
        column_starts = {start for part in with_columns for _, start in part.spans}
        every = zip(selection.names, selection.shapes, strict=True)
        shapes = {name: shape for name, shape in every if starts[name] not in layer_starts}
        rest = {name: shape for name, shape in shapes.items() if starts[name] not in column_starts}
        return LayerwiseRoute(
            selection.n_parameters,
            n_classes,
            layers,
            norms,
            Selection(tuple(rest), tuple(rest.values())),
            tuple(starts[name] for name in rest),
            Spans.of(selection, shapes),
            *sizes[:2],
            grouped,
            sizes[2],
        )

    @property
    def columns(self) -> tuple[NormLayer | GroupedConvolution, ...]:
        """What gives the Jacobian of each sample with the backward pass of the layers, as columns."""
        return (*self.norms, *self.grouped)

    def samples_at_a_time(self, device: torch.device, count: int | None = None) -> int:
        """For how many samples the derivatives, of `count` seeds or of all classes, stay within so many bytes."""
        seeds = count or self.n_classes
        numbers = self.inner_size + seeds * (self.outer_size + len(self.rest_spans))
        if self.layers and not self.inner_size:
            numbers = seeds * self.n_parameters  # unknown after loading from a file
        return rows_at_a_time(numbers, self.widest, device.type, seeds)

    def chunks(self, batch: Batch, device: torch.device, count: int | None = None) -> Iterator[Batch]:
        """The batch in parts of `samples_at_a_time`."""
        return batch.parts(self.samples_at_a_time(device, count))

    def derivatives(
        self, network: Network, batch: Batch, seeds: Seeds | None = None, *, alone: Selection | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], LayerwiseDerivative]]:
        """The logits and their derivative in the network's own dtype, for some samples at a time.

        With `seeds`, the derivative of as many combinations of the logits as there are seeds. A batch that calls the
        layers in another way than the first one is refused or, with the selection `alone`, differentiated one sample at
        a time.
        """
        count = None if seeds is None else seeds.count
        for part in self.chunks(batch, network.device, count):
            try:
                pair = self.differentiate(network, part, seeds)
            except UnlikeFirstBatchError:
                if alone is None:
                    raise
                plain_route = LayerwiseRoute.of(alone, self.n_classes, ())
                for few in plain_route.chunks(part, network.device, count):
                    yield plain_route.differentiate(network, few, seeds)
                continue
            yield pair
            del pair

    def traced(self, network: Network, batch: Batch, count: int | None = None) -> Iterator[tuple[Batch, Trace]]:
        """The batch in parts, each run through the network, for derivatives of some seeds at a time."""
        # The patches of one layer are made at a time.
        inner = self.inner_size // max(1, len(self.layers))
        numbers = inner + 2 * self.outer_size + (count or self.n_classes) * len(self.rest_spans)
        for part in batch.parts(rows_at_a_time(numbers, self.widest, network.device.type)):
            yield part, self.trace(network, part, alone=count == 1)

    def seeds_at_a_time(self, size: int, device: torch.device) -> int:
        """For how many seeds the derivatives of `size` samples stay within the same number of bytes."""
        return min(self.n_classes, seeds_at_a_time(size * self.outer_size, size * self.widest, device.type))

    def differentiate(
        self, network: Network, batch: Batch, seeds: Seeds | None = None, trace: Trace | None = None
    ) -> tuple[Float[Tensor, "B M"], LayerwiseDerivative]:
        """The logits of a prepared batch and their derivative, both in the network's own dtype.

        From a `trace` of that batch if there is one already.
        """
        trace = self.trace(network, batch, alone=seeds is not None and seeds.count == 1) if trace is None else trace
        logits = trace.values
        names = self.differentiated(trace)
        combined = None if seeds is None else seeds(batch, logits).to(logits.dtype)
        derivatives = trace.derivatives(names, class_seeds(logits) if combined is None else combined) if names else {}
        # Of a layer that returns the logits, V is the identity, or the seeds.
        at_logits = None if combined is None else [combined]
        terms = [layer.term(trace.calls[layer.name], derivatives.get(layer.name, at_logits)) for layer in self.layers]
        columns = [(where, part.transpose(0, 1)) for where, part in self.of_columns(derivatives)]
        columns += self.of_rest(network, batch, combined)
        # Under autocast the logits may have a smaller dtype than derivatives.
        dtype = reduce(torch.promote_types, (part.dtype for _, part in columns), logits.dtype)
        count = logits.shape[1] if combined is None else len(combined)
        explicit = torch.empty(len(logits), count, len(self.rest_spans), dtype=dtype, device=logits.device)
        for where, part in columns:
            explicit[..., where] = part
        return logits, LayerwiseDerivative(self.n_parameters, tuple(terms), self.rest_spans, explicit)

    def differentiated(self, trace: Trace) -> list[str]:
        """The names of all that takes a backward pass."""
        between = [layer.name for layer in self.layers if not trace.returns_logits(layer.name)]
        return between + [part.name for part in self.columns]

    def of_columns(self, derivatives: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[slice, Float[Tensor, "k B c"]]]:
        """The derivatives by norms and convolutions in groups, from `Trace.derivatives`, and where among `rest_spans`
        they go."""
        for part in self.columns:
            columns = torch.stack(tuple(derivatives[part.name])).sum(0)
            for where, start in part.spans:
                yield self._where(start, where.stop - where.start), columns[..., where]

    def of_rest(
        self, network: Network, batch: Batch, seeds: Float[Tensor, "k B M"] | None = None
    ) -> Iterator[tuple[slice, Float[Tensor, "B k c"]]]:
        """Jacobians by the parameters that nothing else holds, and where among `rest_spans` they go."""
        if self.rest.names:
            columns = each_by_itself(network, self.rest, batch, seeds)
            for name, start in zip(self.rest.names, self.rest_starts, strict=True):
                where = self.rest.slices()[name]
                yield self._where(start, where.stop - where.start), columns[..., where]

    def _where(self, start: int, size: int) -> slice:
        first = self.rest_spans.index(start)
        return slice(first, first + size)

    def trace(self, network: Network, batch: Batch, *, alone: bool = False) -> Trace:
        """One pass of a prepared batch; `alone` for the derivative of one combination of the logits."""
        return traced(network, batch, self.layers, self.columns, alone=alone)


def rows_at_a_time(numbers: int, widest: int, kind: str, seeds: int = 1) -> int:
    """How many samples of so many `numbers` each, of which the widest output of a layer has `widest`, are traced for a
    backward pass that is mapped over so many seeds."""
    most = max(1, part_bytes(kind) // (8 * max(1, numbers)))
    return min(most, _in_a_piece(seeds * widest, kind, _KEPT_PIECE_BYTES if seeds == 1 else _MAPPED_PIECE_BYTES, most))


def seeds_at_a_time(numbers: int, widest: int, kind: str) -> int:
    """For how many seeds of so many `numbers` each, `widest` of them in one tensor, derivatives are made at a time."""
    most = max(1, part_bytes(kind) // (8 * max(1, numbers)))
    return min(most, _in_a_piece(widest, kind, _MAPPED_PIECE_BYTES, most))


def _in_a_piece(numbers: int, kind: str, limit: int, most: int) -> int:
    """How many times so many numbers go into a piece of memory of `limit` bytes, where that matters; else `most`."""
    return most if kind == "cuda" or not numbers else max(1, limit // (4 * numbers))


def part_bytes(kind: str) -> int:
    """The limit in bytes of what is computed from one part of a batch, on a device of this kind ("cpu", "cuda").

    On a GPU, parts should be as large as its memory easily allows: each of them starts thousands of kernels.
    """
    if kind == "cuda" and torch.cuda.is_available():
        return min(_MOST_PART_BYTES, int(torch.cuda.get_device_properties().total_memory) // 16)
    return _PART_BYTES


def traced(
    network: Network,
    batch: Batch,
    layers: Sequence[SharedLayer],
    columns: Sequence[NormLayer | GroupedConvolution],
    *,
    alone: bool,
) -> Trace:
    """One pass in which these are called as they were by the first batch; else `UnlikeFirstBatchError`."""
    trace = _recorded(network, batch, layers, columns, alone=alone)
    every: tuple[SharedLayer | NormLayer | GroupedConvolution, ...] = (*layers, *columns)
    for layer in every:
        if not layer.accepts(trace.calls[layer.name], len(batch)):
            raise UnlikeFirstBatchError.of(layer.name)
    return trace


def _recorded(
    network: Network,
    batch: Batch,
    layers: Sequence[SharedLayer],
    columns: Sequence[NormLayer | GroupedConvolution],
    *,
    alone: bool,
) -> Trace:
    probes = {part.name: part.probe_alone if alone else part.probe for part in columns}
    return record(network, [layer.name for layer in layers], batch, probes)


def _taken_apart(
    network: Network, selection: Selection, batch: Batch
) -> tuple[Trace, tuple[SharedLayer, ...], tuple[NormLayer | GroupedConvolution, ...]]:
    """What gives vector-Jacobian products that are those of differentiating the whole model.

    A layer that drops out changes how the others are traced, so they are checked again without it.
    """
    layers = tuple(shared_layers(network, selection))
    columns: tuple[NormLayer | GroupedConvolution, ...]
    columns = (*norm_layers(network, selection), *grouped_convolutions(network, selection))
    truth = pulled_back_by_the_whole_model(network, selection, batch)
    while True:
        trace = _recorded(network, batch, layers, columns, alone=False)
        agreement = _Agreement.of(trace, (*layers, *columns), *truth)
        remainder = tuple(filter(agreement.of_layer, layers)), tuple(filter(agreement.of_columns, columns))
        if remainder == (layers, columns):
            return trace, layers, columns
        layers, columns = remainder


@dataclass(frozen=True, eq=False)
class _Agreement:
    """Whether v_nᵀJ_n by the derivatives of a trace is Σ_n v_nᵀJ_n of the whole model, `truth`.

    There is one seed for each sample: if other samples contribute to its derivative, the inputs mix samples.
    """

    trace: Trace
    seeds: Float[Tensor, "B B M"]
    derivatives: dict[str, list[Tensor]]
    truth: Float[Tensor, "n"]
    tolerance: float

    @staticmethod
    def of(
        trace: Trace,
        candidates: Sequence[SharedLayer | NormLayer | GroupedConvolution],
        vectors: Float[Tensor, "B M"],
        truth: Float[Tensor, "n"],
        tolerance: float,
    ) -> _Agreement:
        size = len(vectors)
        seeds = torch.eye(size).to(vectors)[:, :, None] * vectors
        names = [layer.name for layer in candidates if layer.accepts(trace.calls[layer.name], size)]
        try:
            derivatives = trace.derivatives(names, seeds)
        except RuntimeError:
            derivatives = {}
            for name in names:
                # Fails where activations are recomputed in the backward pass, without what the trace has added.
                with suppress(RuntimeError):
                    derivatives |= trace.derivatives([name], seeds)
        # Under autocast inside the model, layers compute in another dtype than their parameters and the logits have.
        outputs = [call.output.dtype for layer in candidates for call in trace.calls[layer.name]]
        return _Agreement(trace, seeds, derivatives, truth, max(tolerance, rounding_of(truth.dtype, *outputs)))

    def of_layer(self, layer: SharedLayer) -> bool:
        if layer.name not in self.derivatives:
            return False
        outer = [self.seeds] if self.trace.returns_logits(layer.name) else self.derivatives[layer.name]
        jacobian = layer.term(self.trace.calls[layer.name], outer).to(torch.float64).jacobian()
        return self._agrees(jacobian.diagonal().sum(-1), gathered(layer, self.truth))

    def of_columns(self, part: NormLayer | GroupedConvolution) -> bool:
        if part.name not in self.derivatives:
            return False
        jacobian = torch.stack(self.derivatives[part.name]).sum(0)
        truth = torch.cat([self.truth[start : start + w.stop - w.start] for w, start in part.spans])
        return self._agrees(jacobian.diagonal().sum(-1), truth)

    def _agrees(self, gradient: Tensor, truth: Float[Tensor, "..."]) -> bool:
        # A layer with a tiny derivative is compared on the scale of the others: the rest is rounding.
        scale = float(truth.norm()) + 1e-2 * float(self.truth.norm())
        return float((gradient.double() - truth).norm()) <= self.tolerance * scale
