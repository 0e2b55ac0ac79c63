"""Forward mode written out layer by layer: values with their derivatives along k directions of the parameters.

`Pushed` stands for a tensor of the network, with the derivative of each sample along each direction beside it. The
network runs as it is, and each elementary operation has its rule here. What `torch.func` does is the same; but
    - a convolution with fixed weights is one convolution of all derivatives together, (B k, channels, …);
    - a norm layer is two passes over memory in place of seven,
          ȧ = (γ/σ) ẋ + β̇  by one kernel, with the directions as channels, and + γ̇ x̂ in place;
    - an activation takes its slope once, for all directions.
An operation without a rule raises `NoRuleError`: `torch.func` then takes the whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class NoRuleError(RuntimeError):
    """An operation that is not written out here."""


class Pushed(Tensor):
    """A tensor and its derivative along k directions: (B, k, …) where it holds samples, (k, …) where it is a parameter.

    `of_parameter` says which.
    """

    primal: Tensor
    tangent: Tensor
    of_parameter: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, primal: Tensor, tangent: Tensor, of_parameter: bool = False) -> Pushed:
        wrapper: Pushed = Tensor._make_wrapper_subclass(
            cls, primal.shape, strides=primal.stride(), dtype=primal.dtype, device=primal.device
        )
        wrapper.primal, wrapper.tangent, wrapper.of_parameter = primal, tangent, of_parameter
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        rule = _RULES.get(operation)
        if rule is None:
            raise NoRuleError(f"{operation} has no rule for derivatives along several directions")
        return rule(operation, *args, **(kwargs or {}))


def _parts(value: Any) -> tuple[Any, Tensor | None]:
    """A value, and its derivative where it is one of samples."""
    if not isinstance(value, Pushed):
        return value, None
    if value.of_parameter:
        raise NoRuleError("a parameter outside of the layers that have rules")
    return value.primal, value.tangent


def _of_parameter(value: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The value of a parameter, or of a fixed weight, and its derivative."""
    if not isinstance(value, Pushed):
        return value, None
    if not value.of_parameter:
        raise NoRuleError("a weight that depends on the input")
    return value.primal, value.tangent


def _summed(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of derivatives; `first`, which nothing else holds, is overwritten."""
    if first is None or second is None:
        return first if second is None else second
    return first.add_(second) if first.shape == second.shape else first + second


def _folded(tangent: Tensor, operation: Callable[[Tensor], Tensor]) -> Tensor:
    """A linear operation on samples, for all directions together."""
    folded: Tensor = operation(tangent.flatten(0, 1))
    return folded.reshape(*tangent.shape[:2], *folded.shape[1:])


def _result(primal: Tensor, tangent: Tensor | None) -> Tensor:
    return primal if tangent is None else Pushed(primal, tangent)


def _convolution(
    operation: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    if transposed:
        raise NoRuleError("a transposed convolution")
    (x, tangent), (fixed, weights), (shift, shifts) = _parts(x), _of_parameter(weight), _of_parameter(bias)
    if x.ndim != fixed.ndim:  # type: ignore[union-attr]
        raise NoRuleError("a convolution of one sample without a batch dimension")
    options = (stride, padding, dilation, transposed, output_padding, groups)
    total = None if tangent is None else _folded(tangent, lambda t: operation(t, fixed, None, *options))
    if weights is not None:
        # The outputs of a group lie together: (groups, k, outputs of one) become one convolution.
        k, outputs = weights.shape[:2]
        apart = weights.unflatten(1, (groups, outputs // groups)).transpose(0, 1).flatten(0, 2)
        own = operation(x, apart, None, *options).unflatten(1, (groups, k, outputs // groups))
        total = _summed(total, own.transpose(1, 2).flatten(2, 3))
    if shifts is not None:
        added = shifts[None, :, :].unflatten(2, (-1, *(1,) * (x.ndim - 2)))
        total = added.expand(len(x), *(-1,) * (added.ndim - 1)) if total is None else total.add_(added)
    primal = operation(x, fixed, shift, *options)
    if total is not None and total.ndim > 2 and total.shape[2:] != primal.shape[1:]:
        total = total.expand(*total.shape[:3], *primal.shape[2:]).contiguous()
    return _result(primal, total)


def _batch_norm(
    operation: Any,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if training or mean is None or variance is None:
        raise NoRuleError("a norm over the batch")
    (x, tangent), (scale, scales), (shift, shifts) = _parts(x), _of_parameter(weight), _of_parameter(bias)
    constants = (training, momentum, eps)
    primal, *saved = operation(x, scale, shift, mean, variance, *constants)
    ones = (1,) * (x.ndim - 2)
    total = None
    if tangent is not None:
        k = tangent.shape[1]
        repeated = [None if one is None else one.repeat(k) for one in (scale, torch.zeros_like(mean), variance)]
        along = None if shifts is None else shifts.flatten()
        channels = tangent.flatten(1, 2)
        total = operation(channels, repeated[0], along, repeated[1], repeated[2], *constants)[0].view(tangent.shape)
        shifts = None
    if scales is not None:
        normal = operation(x, None, None, mean, variance, *constants)[0][:, None]
        factors = scales[None].unflatten(2, (-1, *ones))
        if total is not None:
            total.addcmul_(normal, factors)
        elif shifts is not None:
            total, shifts = torch.addcmul(shifts[None].unflatten(2, (-1, *ones)), normal, factors), None
        else:
            total = normal * factors
    if shifts is not None:
        total = shifts[None].unflatten(2, (-1, *ones)).expand(len(x), -1, -1, *x.shape[2:]).contiguous()
    return (_result(primal, total), *saved)


def _slope(name: str, x: Tensor, args: tuple[Any, ...]) -> Tensor:
    """The derivative of an activation at x."""
    ones = torch.ones_like(x)
    slope: Tensor
    if name == "tanh":
        return 1 - x.tanh().square()
    if name == "sigmoid":
        return x.sigmoid() * (1 - x.sigmoid())
    if name == "relu":
        slope = aten.threshold_backward(ones, x, 0)
    elif name == "hardtanh":
        slope = aten.hardtanh_backward(ones, x, *(args or (-1.0, 1.0)))
    elif name == "leaky_relu":
        slope = aten.leaky_relu_backward(ones, x, *(args or (0.01,)), False)
    else:
        slope = getattr(aten, f"{name}_backward")(ones, x)
    return slope


def _activation(name: str, in_place: bool) -> Callable[..., Tensor]:
    def rule(operation: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
        primal, tangent = _parts(x)
        assert tangent is not None
        if name == "gelu":
            slope = aten.gelu_backward(torch.ones_like(primal), primal, **options)[:, None]
        elif options:
            raise NoRuleError(f"{operation} with {options}")
        else:
            slope = _slope(name, primal, args)[:, None]
        if in_place:
            operation(primal, *args, **options)
            tangent.mul_(slope)
            return x
        return Pushed(operation(primal, *args, **options), tangent * slope)

    return rule


def _linear_in_samples(operation: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Padding, average pooling, copies: the same operation on all derivatives."""
    primal, tangent = _parts(x)
    assert tangent is not None
    if primal.ndim < 4 and operation is not aten.clone.default and operation is not aten.constant_pad_nd.default:
        raise NoRuleError(f"{operation} of one sample without a batch dimension")
    return Pushed(operation(primal, *args, **options), _folded(tangent, lambda t: operation(t, *args, **options)))


def _maximum(operation: Any, x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    primal, tangent = _parts(x)
    assert tangent is not None
    if primal.ndim != 4:
        raise NoRuleError("pooling of one sample without a batch dimension")
    values, places = operation(primal, *args)
    index = places.flatten(2)[:, None].expand(-1, tangent.shape[1], -1, -1)
    return Pushed(values, tangent.flatten(3).gather(3, index).view(*tangent.shape[:3], *values.shape[2:])), places


def _beside(value: Tensor, like: Tensor) -> Tensor:
    """A tensor of the samples, or one that is the same for all of them, ready to go with derivatives of `like`."""
    if value.ndim > like.ndim:
        raise NoRuleError("a product with a tensor of more dimensions")
    return value[:, None] if value.ndim == like.ndim else value


def _addition(sign: int, in_place: bool) -> Callable[..., Tensor]:
    def rule(operation: Any, x: Any, y: Any, *, alpha: float = 1) -> Tensor:
        (first, left), (second, right) = _parts(x), _parts(y)
        if in_place and left is None:
            raise NoRuleError("a derivative is added to a fixed tensor")
        if left is not None and right is not None and first.shape != second.shape:
            raise NoRuleError("a sum of different shapes")
        primal = operation(first, second, alpha=alpha)
        like = first if left is not None else second
        if primal.shape != like.shape:
            raise NoRuleError("a sum of different shapes")
        if in_place:
            assert left is not None
            if right is not None:
                left.add_(right, alpha=sign * alpha)
            return x  # type: ignore[no-any-return]
        if left is None:
            assert right is not None
            return Pushed(primal, right * (sign * alpha))
        return Pushed(primal, left.clone() if right is None else torch.add(left, right, alpha=sign * alpha))

    return rule


def _product(operation: Any, x: Any, y: Any) -> Tensor:
    (first, left), (second, right) = _parts(x), _parts(y)
    primal = operation(first, second)
    if any(part is not None and value.ndim != primal.ndim for part, value in ((left, first), (right, second))):
        raise NoRuleError("a product of different dimensions")

    def along(tangent: Tensor | None, other: Any, like: Any) -> Tensor | None:
        if tangent is None:
            return None
        return operation(tangent, _beside(other, like) if isinstance(other, Tensor) else other)  # type: ignore[no-any-return]

    total = along(left, second, first)
    if operation is aten.div.Tensor:
        if right is not None:
            raise NoRuleError("a quotient")
        return _result(primal, total)
    return _result(primal, _summed(total, along(right, first, second)))


def _mean(operation: Any, x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, **options: Any) -> Tensor:
    primal, tangent = _parts(x)
    assert tangent is not None
    chosen = [] if dims is None else [dim % primal.ndim for dim in dims]
    if not chosen or 0 in chosen or options:
        raise NoRuleError("a mean over samples")
    along = operation(tangent, [dim + 1 for dim in chosen], keepdim)
    return Pushed(operation(primal, chosen, keepdim), along)


def _view(operation: Any, x: Tensor, shape: Sequence[int]) -> Tensor:
    primal, tangent = _parts(x)
    assert tangent is not None
    seen = operation(primal, shape)
    # With as many rows as before, a row is a sample still.
    if seen.ndim < 2 or len(seen) != len(primal):
        raise NoRuleError("a view across samples")
    return Pushed(seen, tangent.reshape(len(seen), tangent.shape[1], *seen.shape[1:]))


def _along_a_dimension(operation: Any, x: Tensor, dim: int = 0, *args: Any) -> Tensor:
    """A slice, or one of its places, in a dimension other than that of the samples."""
    primal, tangent = _parts(x)
    assert tangent is not None
    dim = dim % primal.ndim
    if dim == 0:
        raise NoRuleError("a part of the samples")
    return Pushed(operation(primal, dim, *args), operation(tangent, dim + 1, *args))


def _turned(operation: Any, x: Tensor, first: int, second: int) -> Tensor:
    primal, tangent = _parts(x)
    assert tangent is not None
    one, other = first % primal.ndim, second % primal.ndim
    if 0 in (one, other):
        raise NoRuleError("samples that are transposed")
    return Pushed(operation(primal, one, other), operation(tangent, one + 1, other + 1))


def _transposed(operation: Any, x: Tensor) -> Tensor:
    if not isinstance(x, Pushed) or not x.of_parameter:
        raise NoRuleError("samples that are transposed")
    return Pushed(operation(x.primal), x.tangent.mT, of_parameter=True)


def _affine(operation: Any, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:
    """x W + b, of samples."""
    (x, tangent), (fixed, weights), (shift, shifts) = _parts(x), _of_parameter(weight), _of_parameter(bias)
    assert fixed is not None
    total = None if tangent is None else tangent @ fixed
    if weights is not None:
        total = _summed(total, (x @ weights).transpose(0, 1).contiguous())
    if shifts is not None:
        total = shifts.expand(len(x), -1, -1).clone() if total is None else total.add_(shifts)
    return _result(x @ fixed if shift is None else operation(shift, x, fixed), total)


def _concatenation(operation: Any, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    pairs = [_parts(part) for part in parts]
    first = next(tangent for _, tangent in pairs if tangent is not None)
    dim = dim % pairs[0][0].ndim
    if dim == 0:
        raise NoRuleError("samples that are put together")
    k = first.shape[1]
    tangents = [
        value.new_zeros(len(value), k, *value.shape[1:]) if tangent is None else tangent for value, tangent in pairs
    ]
    return Pushed(operation([value for value, _ in pairs], dim), torch.cat(tangents, dim + 1))


def _same(operation: Any, x: Tensor, *args: Any) -> Tensor:
    """Another name for the same tensor."""
    assert isinstance(x, Pushed)
    return Pushed(x.primal, x.tangent, x.of_parameter)


_ACTIVATIONS = ("relu", "hardtanh", "leaky_relu", "tanh", "sigmoid", "silu", "gelu", "hardswish")
_RULES: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.native_batch_norm.default: _batch_norm,
    aten.constant_pad_nd.default: _linear_in_samples,
    aten.avg_pool2d.default: _linear_in_samples,
    aten._adaptive_avg_pool2d.default: _linear_in_samples,
    aten.clone.default: _linear_in_samples,
    aten.max_pool2d_with_indices.default: _maximum,
    aten.add.Tensor: _addition(1, False),
    aten.add_.Tensor: _addition(1, True),
    aten.sub.Tensor: _addition(-1, False),
    aten.mul.Tensor: _product,
    aten.div.Tensor: _product,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _mean,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _along_a_dimension,
    aten.select.int: _along_a_dimension,
    aten.transpose.int: _turned,
    aten.t.default: _transposed,
    aten.addmm.default: _affine,
    aten.mm.default: lambda operation, x, weight: _affine(operation, None, x, weight),
    aten.cat.default: _concatenation,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
for _name in _ACTIVATIONS:
    _RULES[getattr(aten, _name).default] = _activation(_name, False)
    if hasattr(aten, f"{_name}_"):
        _RULES[getattr(aten, f"{_name}_").default] = _activation(_name, True)
