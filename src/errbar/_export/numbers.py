"""The numbers of a graph in ONNX files, in the dtype of the tensors that they meet.

torch.onnx writes the numbers of operations, such as 1.4 in `x / 1.4`, in float32 and has them cast where they meet
float64: 1.4 becomes 1.39999998. These translations replace those that do so, and keep the numbers. LeakyReLU and ELU,
whose numbers are float32 by the definition of ONNX, are taken apart in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def exact_numbers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export`, for torch's operations of the same names.

    onnxscript takes parameters without an annotation for tensors or numbers, and those with one for attributes.
    """
    import onnxscript
    from onnxscript import ir

    # Of tensors that are being recorded: its annotations are about values.
    op: Any = onnxscript.opset18

    def number(value: Any, dtype: int) -> Any:
        if isinstance(value, (bool, int, float)):
            return op.Constant(value=ir.tensor(value, dtype=ir.DataType(dtype)))
        return op.Cast(value, to=dtype)

    def scalar_tensor(s: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False) -> Any:
        return number(s, ir.DataType.FLOAT if dtype == -1 else dtype)

    def full(
        size: Any, fill_value: Any, dtype: int = -1, layout: str = "", device: str = "", pin_memory: bool = False
    ) -> Any:
        value = fill_value if dtype == -1 else number(fill_value, dtype)
        return op.Expand(value, op.Cast(size, to=ir.DataType.INT64))

    def full_like(
        self: Any,
        fill_value: Any,
        dtype: int = -1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
        memory_format: str = "",
    ) -> Any:
        return op.Expand(number(fill_value, self.dtype if dtype == -1 else dtype), op.Shape(self))

    def new_full(
        self: Any,
        size: Any,
        fill_value: Any,
        dtype: int = -1,
        layout: str = "",
        device: str = "",
        pin_memory: bool = False,
    ) -> Any:
        return full(size, fill_value, self.dtype if dtype == -1 else dtype)

    def masked_fill(self: Any, mask: Any, value: Any) -> Any:
        return op.Where(mask, number(value, self.dtype), self)

    def scaled(value: Any, alpha: float) -> Any:
        return value if alpha == 1 else op.Mul(value, number(alpha, value.dtype))

    def add(self: Any, other: Any, alpha: float = 1.0) -> Any:
        if self.dtype == ir.DataType.BOOL:
            return op.Identity(self) if alpha == 0 else op.Or(self, other)
        return op.Add(self, scaled(other, alpha))

    def sub(self: Any, other: Any, alpha: float = 1.0) -> Any:
        return op.Sub(self, scaled(other, alpha))

    def clamp(self: Any, min: float | None = None, max: float | None = None) -> Any:  # noqa: A002 - torch's names
        low, high = (None if limit is None else number(limit, self.dtype) for limit in (min, max))
        return op.Identity(self) if low is None and high is None else op.Clip(self, low, high)

    def hardtanh(self: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
        return clamp(self, min_val, max_val)

    def leaky_relu(self: Any, negative_slope: float = 0.01) -> Any:
        if self.dtype != ir.DataType.DOUBLE:
            return op.LeakyRelu(self, alpha=negative_slope)
        return op.Where(op.Greater(self, number(0.0, self.dtype)), self, scaled(self, negative_slope))

    def elu(self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
        a, s, i, zero = (number(value, self.dtype) for value in (alpha, scale, input_scale, 0.0))
        if self.dtype != ir.DataType.DOUBLE:
            return op.Mul(op.Elu(op.Mul(self, i), alpha=alpha), s)
        below = op.Sub(op.Exp(op.Mul(op.Min(self, zero), i)), number(1.0, self.dtype))
        return op.Mul(op.Where(op.Greater(self, zero), op.Mul(self, i), op.Mul(a, below)), s)

    return {
        aten.scalar_tensor.default: scalar_tensor,
        aten.full.default: full,
        aten.full_like.default: full_like,
        aten.new_full.default: new_full,
        aten.masked_fill.Scalar: masked_fill,
        aten.add.Tensor: add,
        aten.sub.Tensor: sub,
        aten.clamp.default: clamp,
        aten.hardtanh.default: hardtanh,
        aten.leaky_relu.default: leaky_relu,
        aten.elu.default: elu,
    }
