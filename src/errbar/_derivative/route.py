"""∂g(x; θ)/∂θ_r of a batch: in factored form where the layers allow it, as Jacobians of each sample where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._derivative.columns import grouped_convolutions, norm_layers
from errbar._derivative.full import each_by_itself, pulled_back_by_the_whole_model, require_deterministic
from errbar._derivative.layers import LinearLayer, LinearTerm, linear_layers, shared_layers
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.trace import Seeds, UnlikeFirstBatchError, class_seeds, record
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.positions import PositionsNetwork
from errbar._model.selection import Selection, listed
from errbar.errors import MismatchError

# The size in bytes of the Jacobians that are computed at a time: large enough for an efficient matrix product, small
# beside the posterior.
JACOBIAN_BYTES = {"cpu": 2**27, "cuda": 2**30}
# The number of samples differentiated at a time where no Jacobian is formed.
FACTORED_ROWS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, eq=False)
class Derivative:
    """J of B samples: a sum of terms V ⊗ hᵀ (`terms`), or the matrices themselves (`explicit`)."""

    n_parameters: int
    n_classes: int
    terms: tuple[LinearTerm, ...] | None
    explicit: Float[Tensor, "B M n"] | None

    def jacobian(self) -> Float[Tensor, "B M n"]:
        """J itself, whichever way it is held."""
        if self.explicit is not None:
            return self.explicit
        assert self.terms is not None
        return _assembled(self.terms, self.n_parameters, self.n_classes)

    @staticmethod
    def concatenated(parts: list[Derivative]) -> Derivative:
        """The samples of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if all(part.terms is not None and len(part.terms) == 1 for part in parts):
            terms = [part.terms[0] for part in parts if part.terms is not None]
            outer = [term.outer for term in terms if term.outer is not None]
            inner = torch.cat([term.inner for term in terms])
            whole = LinearTerm(terms[0].layer, inner, torch.cat(outer) if outer else None)
            return Derivative(first.n_parameters, first.n_classes, (whole,), None)
        explicit = torch.cat([part.jacobian() for part in parts])
        return Derivative(first.n_parameters, first.n_classes, None, explicit)

    def of_rotated(self, rotation: Float[Tensor, "M M"]) -> Derivative:
        """The derivative of Qᵀg in place of g: contrasts have their own digits beside a common shift."""
        terms = None if self.terms is None else tuple(term.of_rotated(rotation) for term in self.terms)
        explicit = None if self.explicit is None else rotation.mT @ self.explicit
        return Derivative(self.n_parameters, self.n_classes, terms, explicit)

    def to(self, dtype: torch.dtype) -> Derivative:
        terms = None if self.terms is None else tuple(term.to(dtype) for term in self.terms)
        explicit = None if self.explicit is None else self.explicit.to(dtype)
        return Derivative(self.n_parameters, self.n_classes, terms, explicit)


@dataclass(frozen=True)
class Route:
    """How to differentiate: by the terms of these linear layers, or by Jacobians that are made layer by layer.

    `identity` if the whole selection is one linear layer whose outputs are the logits themselves.
    """

    layers: tuple[LinearLayer, ...]
    identity: bool = False
    by_layer: LayerwiseRoute | None = None

    @staticmethod
    def plan(network: Network, selection: Selection, batch: Batch) -> Route:
        """Decide by what the layers are and, for tokens, by what the first batch shows is cheaper."""
        if isinstance(network, PositionsNetwork):
            # As many logits as positions times classes: only combinations of them are differentiated.
            return Route((), by_layer=LayerwiseRoute.plan(network, selection, batch))
        layers = tuple(linear_layers(network, selection))
        few = batch.rows(0, 2)
        require_deterministic(network, few)
        if sum(layer.size for layer in layers) == selection.n_parameters:
            logits, by_layer = capture(network, layers, few)
            terms = [term for part in (by_layer or {}).values() for term in part]
            if (
                by_layer is not None
                and terms_are_cheaper([term.layer.size for term in terms], selection.n_parameters, logits.shape[1])
                and _agrees(network, selection, layers, by_layer, few)
            ):
                return Route(layers, identity=len(terms) == 1 and terms[0].outer is None)
        return Route((), by_layer=LayerwiseRoute.plan(network, selection, batch))

    @property
    def factored(self) -> bool:
        """Whether no Jacobian is formed."""
        return self.by_layer is None

    def require_on(self, network: Network, selection: Selection) -> None:
        """Refuse a model that does not have the layers which are taken apart."""
        if self.by_layer is None:
            missing = [layer.name for layer in self.layers if layer not in linear_layers(network, selection)]
        else:
            shared = shared_layers(network, selection)
            columns = [*norm_layers(network, selection), *grouped_convolutions(network, selection)]
            missing = [layer.name for layer in self.by_layer.layers if layer not in shared]
            missing += [part.name for part in self.by_layer.columns if part not in columns]
        if missing:
            names = listed([name or "(the model itself)" for name in missing])
            raise MismatchError(
                f"The file was made with the layers {names}, which the model does not have as they were: the "
                "weights are the same, the modules around them are not. Give the model of the fit."
            )

    def chunks(self, batch: Batch, device: torch.device, count: int | None = None) -> Iterator[Batch]:
        """The batch in parts whose derivatives stay within a fixed number of bytes.

        `count` is the number of seeds, in place of the number of classes.
        """
        size = FACTORED_ROWS.get(device.type, FACTORED_ROWS["cpu"])
        if self.by_layer is not None:
            numbers = (count or self.by_layer.n_classes) * self.by_layer.n_parameters
            limit = JACOBIAN_BYTES.get(device.type, JACOBIAN_BYTES["cpu"])
            size = min(max(1, limit // (8 * numbers)), self.by_layer.samples_at_a_time(device, count))
        return batch.parts(size)

    def derivatives(
        self, network: Network, selection: Selection, batch: Batch, seeds: Seeds | None = None
    ) -> Iterator[tuple[Float[Tensor, "b M"], Derivative]]:
        """The logits of a prepared batch and their derivative, for some samples at a time.

        With `seeds`, the derivative of as many combinations of the logits as there are seeds.
        """
        for part in self.chunks(batch, network.device, None if seeds is None else seeds.count):
            yield differentiate(network, selection, self, part, seeds)


def differentiate(
    network: Network, selection: Selection, route: Route, batch: Batch, seeds: Seeds | None = None
) -> tuple[Float[Tensor, "B M"], Derivative]:
    """The logits of a prepared batch and their derivative, both in the network's own dtype.

    With `seeds`, the derivative of as many combinations of the logits as there are seeds.
    """
    n = selection.n_parameters
    if route.by_layer is None:
        logits, by_layer = capture(network, route.layers, batch, seeds)
        if by_layer is not None:
            terms = tuple(term for part in by_layer.values() for term in part)
            return logits, Derivative(n, logits.shape[1] if seeds is None else seeds.count, terms, None)
    else:
        try:
            logits, derivative = route.by_layer.differentiate(network, batch, seeds)
            explicit = derivative.jacobian()
            return logits, Derivative(n, explicit.shape[1], None, explicit)
        except UnlikeFirstBatchError:
            logits = network.logits(batch)
    # The layers are not called as they were by the first batch: one sample at a time works whatever they do.
    explicit = each_by_itself(network, selection, batch, None if seeds is None else seeds(batch, logits))
    return logits, Derivative(n, explicit.shape[1], None, explicit)


def capture(
    network: Network, layers: Sequence[LinearLayer], batch: Batch, seeds: Seeds | None = None
) -> tuple[Float[Tensor, "B M"], dict[str, list[LinearTerm]] | None]:
    """The logits, and the terms V ⊗ hᵀ of each layer: one, or one for each token.

    With `seeds`, V is the derivative of those combinations of the logits. None in place of the terms when a layer was
    not called exactly once, or its input does not start with the samples.
    """
    trace = record(network, [layer.name for layer in layers], batch)
    logits = trace.values
    if any(
        len(calls) != 1 or calls[0].inputs.is_nested or len(calls[0].inputs) != len(logits) or calls[0].inputs.ndim < 2
        for calls in trace.calls.values()
    ):
        return logits, None
    between = [layer.name for layer in layers if not trace.returns_logits(layer.name)]
    combined = None if seeds is None else seeds(batch, logits).to(logits.dtype)
    derivatives = trace.derivatives(between, class_seeds(logits) if combined is None else combined) if between else {}
    terms = {}
    for layer in layers:
        derivative = derivatives[layer.name][0] if layer.name in derivatives else combined
        terms[layer.name] = _terms(layer, trace.calls[layer.name][0].inputs, derivative)
    # Layers may have other dtypes than each other, and under autocast than their inputs.
    tensors = [
        tensor
        for layer_terms in terms.values()
        for term in layer_terms
        for tensor in (term.inner, term.outer)
        if tensor is not None
    ]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), logits.dtype)
    return logits, {name: [term.to(dtype) for term in layer_terms] for name, layer_terms in terms.items()}


def _terms(
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


def _agrees(
    network: Network,
    selection: Selection,
    layers: tuple[LinearLayer, ...],
    by_layer: dict[str, list[LinearTerm]],
    batch: Batch,
) -> bool:
    """Whether one vector-Jacobian product by the terms is what differentiating the whole model gives."""
    vectors, truth, tolerance = pulled_back_by_the_whole_model(network, selection, batch)
    gradient = torch.zeros_like(truth)
    mask = torch.zeros_like(truth, dtype=torch.bool)
    for layer in layers:
        total = sum(term.pulled_back(vectors) for term in by_layer[layer.name])
        positions = layer.positions().to(truth.device)
        gradient[positions] = torch.as_tensor(total).double()
        mask[positions] = True
    return float((gradient - truth)[mask].norm()) <= tolerance * float(truth[mask].norm())


def _assembled(terms: tuple[LinearTerm, ...], n: int, classes: int) -> Float[Tensor, "B M n"]:
    """The sum of the terms, each where its layer lies in the flat vector."""
    first = terms[0].inner
    explicit = first.new_zeros(len(first), classes, n)
    for term in terms:
        part, layer = term.jacobian(), term.layer
        if layer.weight is not None:
            explicit[:, :, layer.weight] += layer.as_flat(part[..., : layer.inputs])
        if layer.bias is not None:
            explicit[:, :, layer.bias] += part[..., -1]
    return explicit


def terms_are_cheaper(sizes: Sequence[int], n: int, classes: int) -> bool:
    """Multiplications per sample: all pairs of terms of so many parameters, a quarter where both are the same, against
    M n² for Jacobians."""
    total = sum(sizes)
    squares = sum(size**2 for size in sizes)
    return squares / 4 + (total**2 - squares) / 2 <= classes * n**2
