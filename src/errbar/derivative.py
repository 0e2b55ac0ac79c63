"""∂g(x; θ)/∂θ_r of a batch: in factored form where the layers allow it, as per-sample Jacobians where not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar.capture import Factor, LinearLayer, capture, linear_layers
from errbar.data import Batch
from errbar.errors import ModelError
from errbar.jacobian import RANDOM_IN_EVAL, jacobians
from errbar.layers import Selection
from errbar.network import Network

# Jacobians of so many bytes are made at a time: enough to fill a matrix product, little beside the posterior.
JACOBIAN_BYTES = 128 * 2**20
# Samples that are differentiated at a time where no Jacobian is formed.
FACTORED_ROWS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True, eq=False)
class Derivative:
    """J of B samples: a sum of terms V ⊗ hᵀ (`factors`), or the matrices themselves (`explicit`)."""

    n_parameters: int
    n_classes: int
    factors: tuple[Factor, ...] | None
    explicit: Float[Tensor, "B M n"] | None

    def jacobian(self) -> Float[Tensor, "B M n"]:
        """J itself, whichever way it is held."""
        if self.explicit is not None:
            return self.explicit
        assert self.factors is not None
        return _assembled(self.factors, self.n_parameters, self.n_classes)

    @staticmethod
    def concatenated(parts: list[Derivative]) -> Derivative:
        """The samples of several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        if all(part.factors is not None and len(part.factors) == 1 for part in parts):
            factors = [part.factors[0] for part in parts if part.factors is not None]
            outer = [factor.outer for factor in factors if factor.outer is not None]
            inner = torch.cat([factor.inner for factor in factors])
            joined = Factor(factors[0].layer, inner, torch.cat(outer) if outer else None)
            return Derivative(first.n_parameters, first.n_classes, (joined,), None)
        explicit = torch.cat([part.jacobian() for part in parts])
        return Derivative(first.n_parameters, first.n_classes, None, explicit)

    def to(self, dtype: torch.dtype) -> Derivative:
        factors = None if self.factors is None else tuple(factor.to(dtype) for factor in self.factors)
        explicit = None if self.explicit is None else self.explicit.to(dtype)
        return Derivative(self.n_parameters, self.n_classes, factors, explicit)


@dataclass(frozen=True)
class Route:
    """How to differentiate: which linear layers are captured, and which parameters take generic Jacobians."""

    layers: tuple[LinearLayer, ...]
    rest: Selection
    factored: bool
    identity: bool = False

    @staticmethod
    def plan(network: Network, selection: Selection, batch: Batch) -> Route:
        """Decide by what the layers are and, for tokens, by what the first batch shows is cheaper."""
        layers = tuple(linear_layers(network, selection))
        few = batch.rows(0, 2)
        require_deterministic(network, few)
        if layers:
            logits, terms = capture(network, layers, few)
            if terms is not None and _agrees(network, selection, layers, terms, few):
                factors = [factor for part in terms.values() for factor in part]
                cheap = _factors_are_cheaper(factors, selection.n_parameters, logits.shape[1])
                identity = len(factors) == 1 and factors[0].outer is None
                return Route.of(selection, layers, cheap=cheap, identity=identity)
        return Route((), selection, False)

    @staticmethod
    def of(selection: Selection, layers: tuple[LinearLayer, ...], *, cheap: bool, identity: bool) -> Route:
        """By captured layers; their terms are used as they are where they are cheap and nothing else is selected."""
        rest = _rest(selection, layers)
        return Route(layers, rest, cheap and not rest.names, identity)

    @property
    def returns_logits(self) -> bool:
        """Whether all that is selected is one linear layer whose output are the logits themselves."""
        return self.factored and self.identity

    def chunks(self, batch: Batch, device: torch.device, *, classes: int, n_parameters: int) -> Iterator[Batch]:
        """The batch in parts that keep what is made of them within a fixed number of bytes."""
        size = max(1, JACOBIAN_BYTES // (8 * classes * n_parameters))
        if self.factored:
            size = FACTORED_ROWS.get(device.type, 1024)
        for start in range(0, len(batch), size):
            yield batch.rows(start, min(start + size, len(batch)))


def differentiate(
    network: Network, selection: Selection, route: Route, batch: Batch
) -> tuple[Float[Tensor, "B M"], Derivative]:
    """The logits of a prepared batch and their derivative, both in the network's own dtype."""
    n = selection.n_parameters
    terms = None
    if route.layers:
        logits, terms = capture(network, route.layers, batch)
    else:
        logits = network.logits(batch)
    classes = logits.shape[1]
    if terms is None:
        return logits, Derivative(n, classes, None, jacobians(network, selection, batch))
    factors = tuple(factor for part in terms.values() for factor in part)
    if route.factored:
        return logits, Derivative(n, classes, factors, None)
    explicit = _assembled(factors, n, classes)
    if route.rest.names:
        slices, start = selection.slices(), 0
        generic = jacobians(network, route.rest, batch)
        for name, size in zip(route.rest.names, route.rest.sizes, strict=True):
            explicit[:, :, slices[name]] = generic[:, :, start : start + size]
            start += size
    return logits, Derivative(n, classes, None, explicit)


def require_deterministic(network: Network, batch: Batch) -> None:
    """A model that draws random numbers in eval mode has no derivative to speak of."""
    first, second = network.logits(batch), network.logits(batch)
    # Logits that are not finite have an error of their own.
    if bool(((first - second).abs() > 1e-2 * first.abs().amax()).any()):
        raise ModelError(RANDOM_IN_EVAL)


def pulled_back_by_the_whole_model(
    network: Network, selection: Selection, batch: Batch
) -> tuple[Float[Tensor, "B M"], Float[Tensor, "n"], float]:
    """Random v_n, Σ_n v_nᵀ J_n by differentiating the whole model, and the relative error that rounding explains.

    What the terms of a layer make of the same v must agree. It does not where a weight is used outside its layer as
    well (a norm of it, a tied product): no module tells of that.
    """
    values = {name: value.clone().requires_grad_() for name, value in selection.values(network.module).items()}
    with torch.enable_grad():
        logits = network.logits(batch, values)
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(logits.shape, generator=generator).to(logits)
        gradients = torch.autograd.grad(
            (logits * vectors).sum(), list(values.values()), allow_unused=True, materialize_grads=True
        )
    truth = torch.cat([gradient.reshape(-1) for gradient in gradients]).double()
    return vectors, truth, {torch.float64: 1e-9, torch.float32: 1e-3}.get(logits.dtype, 0.1)


def _agrees(
    network: Network,
    selection: Selection,
    layers: tuple[LinearLayer, ...],
    terms: dict[str, list[Factor]],
    batch: Batch,
) -> bool:
    """Whether one vector-Jacobian product by the terms is what differentiating the whole model gives."""
    vectors, truth, tolerance = pulled_back_by_the_whole_model(network, selection, batch)
    made = torch.zeros_like(truth)
    covered = torch.zeros_like(truth, dtype=torch.bool)
    for layer in layers:
        total = sum(factor.pulled_back(vectors) for factor in terms[layer.name])
        positions = layer.positions().to(truth.device)
        made[positions] = torch.as_tensor(total).double()
        covered[positions] = True
    return float((made - truth)[covered].norm()) <= tolerance * float(truth[covered].norm())


def _assembled(factors: tuple[Factor, ...], n: int, classes: int) -> Float[Tensor, "B M n"]:
    """The sum of the terms, each where its layer lies in the flat vector."""
    first = factors[0].inner
    explicit = first.new_zeros(len(first), classes, n)
    for factor in factors:
        term, layer = factor.jacobian(), factor.layer
        if layer.weight is not None:
            explicit[:, :, layer.weight] += term[..., : layer.inputs].flatten(2)
        if layer.bias is not None:
            explicit[:, :, layer.bias] += term[..., -1]
    return explicit


def _rest(selection: Selection, layers: tuple[LinearLayer, ...]) -> Selection:
    """The selected parameters that no captured layer holds."""
    slices = selection.slices()
    covered = {part.start for layer in layers for part in (layer.weight, layer.bias) if part is not None}
    names = [name for name in selection.names if slices[name].start not in covered]
    shapes = dict(zip(selection.names, selection.shapes, strict=True))
    return Selection(tuple(names), tuple(shapes[name] for name in names))


def _factors_are_cheaper(factors: list[Factor], n: int, classes: int) -> bool:
    """Multiplications a sample: all pairs of terms, a quarter where both are the same, against M n² for Jacobians."""
    sizes = [factor.layer.outputs * factor.layer.width for factor in factors]
    total = sum(sizes)
    squares = sum(size**2 for size in sizes)
    return squares / 4 + (total**2 - squares) / 2 <= classes * n**2
