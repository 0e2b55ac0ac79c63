"""What convolutions with a `forward` of their own compute: a plain one of an input that they have padded, or not.

Several libraries derive from `nn.Conv2d` to pad as other frameworks do ("same"), to normalise the weight, or to act on
the result. Which it is shows when the module runs: it is plain if it calls the convolution once, with its own weight
and bias, and returns just what that returns. What that is given is then the input that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_CALLS = (torch.conv1d, torch.conv2d)


def convolution_kind(part: nn.Module) -> type[nn.Conv1d] | type[nn.Conv2d] | None:
    """The class of torch that a convolution over one or two dimensions is, or derives from."""
    return next((kind for kind in (nn.Conv1d, nn.Conv2d) if isinstance(part, kind)), None)


def has_own_forward(part: nn.Module) -> bool:
    """Whether it derives from a convolution of torch and computes in its own way."""
    kind = convolution_kind(part)
    return kind is not None and type(part).forward is not kind.forward


class ConvolutionInputs(TorchFunctionMode):
    """While it is active, the last convolution is known; of each weight, how often it was used."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Tensor, dict[str, Any]] | None = None
        self._uses: dict[int, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _CALLS:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            given = dict(zip(names, args, strict=False)) | kwargs
            self._last = (result, given)
            self._uses[id(given["weight"])] = self._uses.get(id(given["weight"]), 0) + 1
        return result

    def taken(self, part: nn.Module, output: Any) -> Tensor | None:
        """The padded input, if `output`, which a module has just returned, is that of its only plain convolution."""
        last, self._last = self._last, None
        uses = self._uses.pop(id(part.weight), 0)
        if last is None or last[0] is not output or uses != 1:
            return None
        given, sizes = last[1], len(part.kernel_size)  # type: ignore[arg-type]
        own = all(given.get(name) is getattr(part, name) for name in ("weight", "bias"))
        same = all(
            _each(given.get(name, 1), sizes) == _each(getattr(part, name), sizes) for name in ("stride", "dilation")
        )
        padding = given.get("padding", 0)
        if not own or not same or given.get("groups", 1) != part.groups or isinstance(padding, str):
            return None
        around = [size for size in reversed(_each(padding, sizes)) for _ in range(2)]
        value: Tensor = given["input"]
        return F.pad(value, around) if any(around) else value


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each dimension."""
    values = (value,) * count if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values
