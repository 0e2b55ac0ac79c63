"""Operations by their formulas, whose derivatives torch has wrong, or not at all, where a graph leads through them.

The kernels of layer norm and instance norm save the mean and the deviation of an input. A derivative in forward mode,
and the derivative of a gradient's derivative, take these for constants, so that a graph that leads through them has the
wrong gradient without a word (pytorch/pytorch#196700). `glu` and `hardsigmoid` have no derivative there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class WrittenOut(TorchFunctionMode):
    """Inside of it, these operations are made of others that have all derivatives."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _FORMULAS.get(function, function)(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,  # noqa: A002 - as in torch
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    normal = _standardised(input, tuple(range(-len(normalized_shape), 0)), eps)
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias


def _instance_norm(
    input: Tensor,  # noqa: A002 - as in torch
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    normal = _standardised(input, tuple(range(2, input.ndim)), eps)
    by_channel = (-1, *(1,) * (input.ndim - 2))
    scaled = normal if weight is None else normal * weight.reshape(by_channel)
    return scaled if bias is None else scaled + bias.reshape(by_channel)


def _standardised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _glu(input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002
    return F.relu6(input + 3) / 6


_FORMULAS: dict[Any, Callable[..., Tensor]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
    torch.instance_norm: _instance_norm,
    F.glu: _glu,
    F.hardsigmoid: _hardsigmoid,
}
