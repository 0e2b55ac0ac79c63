"""J δ for directions δ of the parameters, by forward mode: all classes at once, at about a forward pass for each δ."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from errbar._derivative.full import RANDOM_IN_EVAL
from errbar._derivative.tangents import NoRuleError, Pushed
from errbar._derivative.trace import quiet_vmap
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.errors import ModelError

Values = dict[str, Tensor]


def pushed_forward(
    network: Network, selection: Selection, batch: Batch, directions: Float[Tensor, "k n"]
) -> Float[Tensor, "k B M"]:
    """J_n δ of each sample n of a prepared batch and each of k directions δ, in the network's own dtype.

    What is written out keeps no graph, so a network that does takes the ways of `torch.func`.
    """
    _load_forward_rules()
    values = selection.values(network.module)
    tangents = {name: part.to(values[name].dtype) for name, part in selection.unflatten(directions).items()}

    def logits(changed: Values) -> Tensor:
        return network.logits(batch, changed)

    # Fused attention kernels have no derivative in forward mode; the plain formula has.
    with quiet_vmap(), sdpa_kernel(SDPBackend.MATH):
        for push in _WAYS[network.keeps_graph :]:
            try:
                return push(logits, values, tangents)
            except NoRuleError:
                continue
            except RuntimeError as error:
                if "randomness" in str(error):
                    raise ModelError(RANDOM_IN_EVAL) from error
                if push is _by_two_backward_passes or isinstance(error, torch.OutOfMemoryError):
                    raise
    raise AssertionError("unreachable")


@cache
def _load_forward_rules() -> None:
    """Rules that torch loads at the first use of forward mode, by a part of itself that it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _written_out(logits: Callable[[Values], Tensor], values: Values, tangents: Values) -> Float[Tensor, "k B M"]:
    """By the rules of `_derivative.tangents`, for networks of the usual layers."""
    pairs: Values = {name: Pushed(value, tangents[name], of_parameter=True) for name, value in values.items()}
    with torch.no_grad():
        result = logits(pairs)
    if not isinstance(result, Pushed) or result.tangent.shape[2:] != result.primal.shape[1:]:
        raise NoRuleError("the logits do not depend on the parameters")
    return result.tangent.transpose(0, 1)


def _all_together(logits: Callable[[Values], Tensor], values: Values, tangents: Values) -> Float[Tensor, "k B M"]:
    def push(tangent: Values) -> Tensor:
        pushed: Tensor = jvp(logits, (values,), (tangent,))[1]
        return pushed

    return vmap(push)(tangents)


def _one_by_one(logits: Callable[[Values], Tensor], values: Values, tangents: Values) -> Float[Tensor, "k B M"]:
    """For models that cannot be mapped over directions: data-dependent branches, operations without a batching rule."""
    count = len(next(iter(tangents.values())))
    return torch.stack([jvp(logits, (values,), (_of(tangents, index),))[1] for index in range(count)])


def _by_two_backward_passes(
    logits: Callable[[Values], Tensor], values: Values, tangents: Values
) -> Float[Tensor, "k B M"]:
    """For operations without a derivative in forward mode: vᵀJ is linear in v, and its derivative along δ is J δ."""
    output, back, *_ = vjp(logits, values)
    _, forward, *_ = vjp(lambda cotangent: back(cotangent)[0], torch.zeros_like(output))
    count = len(next(iter(tangents.values())))
    return torch.stack([forward(_of(tangents, index))[0] for index in range(count)])


def _of(tangents: Mapping[str, Tensor], index: int) -> Values:
    return {name: part[index] for name, part in tangents.items()}


# From the quickest to the one that takes most networks.
_WAYS = (_written_out, _all_together, _one_by_one, _by_two_backward_passes)
