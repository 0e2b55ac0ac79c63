"""Which parameters θ_r the posterior is about, and where they lie in the flat parameter vector."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.checks import whole_number
from errbar._model.network import Network
from errbar.errors import MismatchError, SelectionError

# What `parameters` can be besides names of modules and parameters.
NAMED_SETS = ("all", "trainable", "vectors")


@dataclass(frozen=True)
class Selection:
    """Chosen parameters in the order of `model.named_parameters()`, each flattened row by row.

    `sizes` and their sum `n_parameters` follow from the shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    n_parameters: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(math.prod(shape) for shape in self.shapes))
        object.__setattr__(self, "n_parameters", sum(self.sizes))

    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the flat vector."""
        slices, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            slices[name] = slice(start, start + size)
            start += size
        return slices

    def chosen(self, names: Collection[str]) -> Selection:
        """Some of the parameters."""
        pairs = [pair for pair in zip(self.names, self.shapes, strict=True) if pair[0] in names]
        return Selection(tuple(name for name, _ in pairs), tuple(shape for _, shape in pairs))

    def matrices(self) -> dict[str, int]:
        """The modules that own tensors of two dimensions or more, and how many parameters those have."""
        sizes: dict[str, int] = {}
        for name, shape, size in zip(self.names, self.shapes, self.sizes, strict=True):
            if sum(length > 1 for length in shape) > 1:
                sizes[owner(name)] = sizes.get(owner(name), 0) + size
        return sizes

    def values(self, module: nn.Module) -> dict[str, Tensor]:
        """The chosen parameters of `module`, detached."""
        parameters = dict(module.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    def flatten(self, module: nn.Module) -> Float[Tensor, "n"]:
        """θ̂_r as one float64 vector."""
        return torch.cat([value.reshape(-1).double() for value in self.values(module).values()])

    def unflatten(self, vectors: Float[Tensor, "K n"]) -> dict[str, Tensor]:
        """K flat vectors as one (K, …) tensor for each parameter."""
        slices = self.slices()
        return {
            name: vectors[:, slices[name]].reshape(-1, *shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
        }


@dataclass(frozen=True)
class Layer:
    """One layer as `last_layers` counts them: a module that ran, or weights used without their module."""

    name: str
    parameters: tuple[str, ...]

    @staticmethod
    def all_of(module: nn.Module, names: Sequence[str]) -> list[Layer]:
        """Modules inside `module`, each with all its parameters."""
        # named_parameters() gives a tied parameter one name only; find it by identity.
        every = {id(parameter): name for name, parameter in module.named_parameters()}
        parts = dict(module.named_modules(remove_duplicate=False))
        own = ({id(parameter) for parameter in parts[name].parameters()} for name in names)
        return [
            Layer(name, tuple(full for key, full in every.items() if key in keys))
            for name, keys in zip(names, own, strict=True)
        ]


def select(
    network: Network,
    layers: Sequence[Layer],
    *,
    last_layers: int | None,
    parameters: str | Sequence[str] | None,
    idle: Sequence[str] = (),
) -> Selection:
    """The parameters asked for; `layers` in the order of their last use, without those that do not reach the logits."""
    available = dict(network.module.named_parameters())
    if parameters == "vectors":
        names = _last(layers, 1, idle) | {name for name, parameter in available.items() if parameter.ndim <= 1}
    else:
        names = _named(network.module, parameters) if last_layers is None else _last(layers, last_layers, idle)
    selected_names = [name for name in available if name in names]
    for name in selected_names:
        if not available[name].is_floating_point():
            raise SelectionError(f"Parameter '{name}' is {available[name].dtype}; expected a floating-point one.")
    return Selection(tuple(selected_names), tuple(tuple(available[name].shape) for name in selected_names))


def require_one_question(last_layers: object, parameters: object) -> None:
    """Exactly one of the two ways to select must be used, with a value of the right type."""
    if (last_layers is None) == (parameters is None):
        count = "neither" if last_layers is None else "both"
        raise SelectionError(
            f"Expected exactly one of last_layers= and parameters=, got {count}. Use last_layers=2 for the two layers "
            "that run last, parameters='all', 'trainable' or 'vectors', or parameters=['name', ...]."
        )
    if last_layers is not None:
        whole = whole_number(last_layers)
        if whole is None:
            raise SelectionError(f"last_layers is {last_layers!r}; expected a whole number of layers, 1 or more.")
        if whole < 1:
            raise SelectionError(f"last_layers is {whole}; expected 1 or more.")
        return
    names = [parameters] if isinstance(parameters, str) else parameters
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise SelectionError(
            f"parameters is {parameters!r}; expected module or parameter names, 'all', 'trainable' or 'vectors'."
        )
    if len(names) == 0:
        raise SelectionError("parameters is empty; expected at least one module or parameter name, or 'all'.")


def layers_that_ran(module: nn.Module, order: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules with parameters that ran, in order, none of which contains another that ran.

    A parametrised module (weight norm) counts as one layer with its parametrisations; a module whose children never
    run themselves (attention with a fused kernel) counts as one layer with its children.
    """
    modules = dict(module.named_modules())
    ran = [name for name in order if not _inside_parametrisation(name)]
    layers = []
    for name in ran:
        prefix = f"{name}." if name else ""
        is_leaf = not any(other != name and other.startswith(prefix) for other in ran)
        if is_leaf and any(True for _ in modules[name].parameters()):
            layers.append((name, modules[name]))
    return layers


def _inside_parametrisation(name: str) -> bool:
    return "parametrizations" in name.split(".")


def _last(layers: Sequence[Layer], count: int, idle: Sequence[str]) -> set[str]:
    if count > len(layers):
        reason = f" The logits do not depend on {', '.join(idle)}." if idle else ""
        raise SelectionError(
            f"last_layers is {count}, but only {len(layers)} layers with parameters ran: "
            f"{', '.join(layer.name or '(the model itself)' for layer in layers)}. Expected 1 to {len(layers)}.{reason}"
        )
    return {name for layer in layers[-count:] for name in layer.parameters}


def _named(module: nn.Module, parameters: str | Sequence[str] | None) -> set[str]:
    # A tied parameter can be asked for by each of its names, and is listed under the first.
    every = dict(module.named_parameters(remove_duplicate=False))
    if parameters == "all":
        return set(every)
    if parameters == "trainable":
        trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if not trainable:
            raise SelectionError("parameters is 'trainable', but no parameter of the model requires gradients.")
        return trainable
    prefixes = [parameters] if isinstance(parameters, str) else list(parameters or ())
    identities: set[int] = set()
    for prefix in prefixes:
        matches = matching(list(every), prefix)
        if not matches:
            raise SelectionError(f"No parameter is called '{prefix}' or lies in it. {_suggestion(list(every), prefix)}")
        identities.update(id(every[name]) for name in matches)
    return {name for name, parameter in module.named_parameters() if id(parameter) in identities}


def matching(available: Sequence[str], prefix: str) -> list[str]:
    """Names that are `prefix` or lie in the module `prefix`."""
    return [name for name in available if name == prefix or name.startswith(f"{prefix}.")]


def owner(name: str) -> str:
    """The module that owns a parameter; a parametrisation belongs to the module that it parametrises."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("parametrizations")] if "parametrizations" in parts else parts[:-1])


def _suggestion(available: Sequence[str], prefix: str) -> str:
    modules = {name.rpartition(".")[0] for name in available} - {""}
    neighbours = difflib.get_close_matches(str(prefix), [*modules, *available], n=3, cutoff=0.5)
    examples = neighbours or list(available)[:8]
    more = "" if neighbours or len(available) <= 8 else f" and {len(available) - 8} more"
    return f"Did you mean {', '.join(neighbours)}?" if neighbours else f"There are {', '.join(examples)}{more}."


def listed_modules(names: Sequence[str]) -> str:
    """Names of modules in a sentence, the first few of many."""
    names_shown = ", ".join(f"'{name}'" if name else "the model's own parameters" for name in names[:4])
    return names_shown if len(names) <= 4 else f"{names_shown} and {len(names) - 4} more"


def require_selection_on(network: Network, selection: Selection) -> None:
    """Refuse a model that does not have these parameters."""
    available = dict(network.module.named_parameters())
    order = [name for name in available if name in selection.names]
    shapes = [tuple(available[name].shape) for name in order]
    if (tuple(order), tuple(shapes)) != (selection.names, selection.shapes):
        raise MismatchError(
            f"The file is about the parameters {listed(selection.names)}, which the model does not have with "
            "these names, shapes and in this order. Give the model of the fit."
        )


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few of some names, and how many more there are."""
    more = "" if len(names) <= most else f" and {len(names) - most} more"
    return ", ".join(name[:60] for name in names[:most]) + more
