"""Sums of information as named arrays, and back: triangles of symmetric matrices, and what is small as JSON.

Every function comes in pairs, one that takes apart and one that puts together; what is put together is checked against
the parameters that the file says it is about, whatever the file says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._curvature.block import BlockSum, blocks
from errbar._curvature.dense import DenseSum
from errbar._curvature.diagonal import DiagonalSum
from errbar._curvature.kronecker import KroneckerBlock, KroneckerSum
from errbar._curvature.lowrank import LowRankSum
from errbar._curvature.per_class import PerClassSum
from errbar._derivative.shared import Patches, SharedLayer, Spans
from errbar._derivative.trace import LinearLayer
from errbar._model.selection import Selection
from errbar._posterior.differentiate import Sum
from errbar.errors import DamagedFileError

Tensors = dict[str, Tensor]
Description = dict[str, Any]


# Matrices are compared with their mirror image, and mirrored, in tiles that stay in the cache.
_TILE = 256


def symmetric_array(matrix: Float[Tensor, "n n"]) -> Tensor:
    """The rows of the lower triangle one after the other; a matrix that is not exactly symmetric stays whole."""
    matrix = matrix.cpu()
    mirror = matrix.mT
    if all(torch.equal(matrix[rows, columns], mirror[rows, columns]) for rows, columns in _tiles(len(matrix))):
        return triangle_array(matrix)
    return matrix.contiguous()


def triangle_array(lower: Float[Tensor, "*B n n"], *, by_columns: bool = False) -> Float[Tensor, "*B k"]:
    """The rows of the lower triangles one after the other, or the columns, where those lie together in memory."""
    lower, n = lower.cpu(), lower.shape[-1]
    flat = lower.new_empty(*lower.shape[:-2], n * (n + 1) // 2)
    source, start = lower.mT if by_columns else lower, 0
    for index, (first, last) in enumerate(_stretches(n, by_columns)):
        flat[..., start : start + last - first] = source[..., index, first:last]
        start += last - first
    return flat


def from_triangle(flat: Float[Tensor, "*B k"], n: int, *, by_columns: bool = False) -> Float[Tensor, "*B n n"]:
    """Lower triangular matrices, in the memory layout that they had: the inverse of `triangle_array`."""
    made = flat.new_zeros(*flat.shape[:-1], n, n)
    _fill(made, flat, by_columns)
    return made.mT if by_columns else made


def read_symmetric(contents: Contents, name: str, n: int, *, by_columns: bool = False) -> Float[Tensor, "n n"]:
    """The inverse of `symmetric_array`, in the memory layout that the matrix had."""
    if n > 1 and contents.shape(name) == (n, n):
        return laid_out(contents.tensor(name, n, n), by_columns)
    flat = contents.tensor(name, n * (n + 1) // 2)
    whole = flat.new_empty(n, n)
    _fill(whole, flat, False)
    for rows, columns in _tiles(n):
        if rows == columns:
            part = whole[rows, rows]
            whole[rows, rows] = part.tril() + part.tril(-1).mT
        else:
            whole[columns, rows] = whole[rows, columns].mT
    return whole.mT if by_columns else whole


def by_columns(matrix: Tensor) -> bool:
    """Whether the columns of a matrix, and not its rows, lie together in memory."""
    return not matrix.is_contiguous() and matrix.mT.is_contiguous()


def laid_out(matrix: Tensor, by_columns: bool) -> Tensor:
    return matrix.mT.contiguous().mT if by_columns else matrix


def _stretches(n: int, by_columns: bool) -> Iterator[tuple[int, int]]:
    """Where the entries of the triangle are in each row, or in each column."""
    for index in range(n):
        yield (index, n) if by_columns else (0, index + 1)


def _fill(made: Float[Tensor, "*B n n"], flat: Float[Tensor, "*B k"], by_columns: bool) -> None:
    start = 0
    for index, (first, last) in enumerate(_stretches(made.shape[-1], by_columns)):
        made[..., index, first:last] = flat[..., start : start + last - first]
        start += last - first


def _tiles(n: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the tiles on and below the diagonal."""
    for start in range(0, n, _TILE):
        for left in range(0, start + 1, _TILE):
            yield slice(start, min(start + _TILE, n)), slice(left, min(left + _TILE, n))


def read_layers(fields: Sequence[Fields], selection: Selection, *, shared: bool) -> tuple[LinearLayer, ...]:
    """Layers whose parameters are among the selected ones, each in one layer at most."""
    sizes = {where.start: where.stop - where.start for where in selection.slices().values()}
    found = []
    for part in fields:
        starts = {kind: part.whole(kind) if kind in part else None for kind in ("weight_start", "bias_start")}
        name, outputs, inputs = part.text("name"), part.whole("outputs", 1), part.whole("inputs", 1)
        # Files of before such layers were taken apart do not say so.
        transposed = part.flag("transposed") if "transposed" in part else False
        layer = LinearLayer(name, outputs, inputs, starts["weight_start"], starts["bias_start"], transposed)
        if shared:
            patches = _read_patches(part.part("patches")) if "patches" in part else None
            layer = SharedLayer(name, outputs, inputs, layer.weight_start, layer.bias_start, transposed, patches)
        expected = {layer.weight_start: outputs * inputs, layer.bias_start: outputs}
        expected.pop(None, None)
        if not expected or any(sizes.pop(start, None) != size for start, size in expected.items() if start is not None):
            raise DamagedFileError(f"{part.where} describes layer {name[:60]!a} that its parameters do not make up.")
        found.append(layer)
    return tuple(found)


def _read_patches(fields: Fields) -> Patches:
    kernel, stride, dilation, padding = (fields.wholes(name) for name in ("kernel", "stride", "dilation", "padding"))
    return Patches(kernel, stride, dilation, padding, fields.text("mode"))


def take_apart(total: Sum) -> tuple[Description, Tensors]:
    """A sum as what is small, with the `form` that it has, and arrays."""
    if isinstance(total, DenseSum):
        return {"form": "dense"}, {"sum": symmetric_array(total.matrix)}
    if isinstance(total, PerClassSum):
        return {"form": "per_class"}, {"sum": total.totals}
    if isinstance(total, BlockSum):
        arrays = {f"sum.{index}": symmetric_array(part.matrix) for index, part in enumerate(total.totals)}
        return {"form": "block"}, arrays
    if isinstance(total, DiagonalSum):
        return {"form": "diag"}, {"sum": total.values}
    if isinstance(total, LowRankSum):
        description = {"form": "lowrank", "bound": total.bound, "rank": total.rank, "rows": len(total.rows)}
        return description, {"sum.rows": total.rows, "sum.diagonal": total.diagonal}
    made: Tensors = {"sum.rest": total.rest.values}
    small = []
    for index, block in enumerate(total.blocks):
        made[f"sum.{index}.inner"] = symmetric_array(block.inner)
        made[f"sum.{index}.outer"] = symmetric_array(block.outer)
        a, g, c = block.peak
        small.append({"count": block.count, "inner_peak": a, "outer_peak": g, "count_peak": c})
    return {"form": "kron", "blocks": small, "rest_peak": total.rest_peak}, made


def put_together(
    contents: Contents,
    selection: Selection,
    layers: tuple[LinearLayer, ...],
    *,
    form: str,
    n_classes: int,
    dtype: torch.dtype,
) -> Sum:
    """The sum in a file, on the CPU. `form` is what the structure asks for; the file must say the same."""
    fields = contents.description.part("sum")
    fields.choice("form", (form,))
    n = selection.n_parameters
    if form == "dense":
        return DenseSum(read_symmetric(contents, "sum", n))
    if form == "per_class":
        (layer,) = layers
        return PerClassSum(layer, contents.tensor("sum", layer.width * (layer.width + 1) // 2, n_classes))
    if form == "block":
        parts = blocks(selection)
        totals = [read_symmetric(contents, f"sum.{index}", len(block.part)) for index, block in enumerate(parts)]
        return BlockSum(parts, tuple(DenseSum(matrix) for matrix in totals))
    if form == "diag":
        return DiagonalSum(contents.tensor("sum", n))
    if form == "lowrank":
        rank = fields.whole("rank", 1)
        rows = contents.tensor("sum.rows", min(fields.whole("rows"), rank), n, dtype=dtype)
        return LowRankSum(rows, contents.tensor("sum.diagonal", n), fields.number("bound", least=0), rank)
    return _read_kronecker(contents, fields, selection, layers)


def _read_kronecker(
    contents: Contents, fields: Fields, selection: Selection, layers: tuple[LinearLayer, ...]
) -> KroneckerSum:
    parts = fields.parts("blocks")
    if len(parts) != len(layers):
        raise DamagedFileError(f"{contents.path} has {len(parts)} Kronecker factors for {len(layers)} layers.")
    made = []
    for index, (part, layer) in enumerate(zip(parts, layers, strict=True)):
        assert isinstance(layer, SharedLayer)
        inner = read_symmetric(contents, f"sum.{index}.inner", layer.width)
        outer = read_symmetric(contents, f"sum.{index}.outer", layer.outputs)
        a, g, c = (part.number(name, least=0) for name in ("inner_peak", "outer_peak", "count_peak"))
        made.append(KroneckerBlock(layer, inner, outer, part.number("count", least=0), (a, g, c)))
    rest_spans = rest_of(selection, layers)
    rest = DiagonalSum(contents.tensor("sum.rest", len(rest_spans)))
    return KroneckerSum(selection.n_parameters, tuple(made), rest_spans, rest, fields.number("rest_peak", least=0))


def rest_of(selection: Selection, layers: tuple[LinearLayer, ...]) -> Spans:
    """The parameters that no layer holds."""
    covered = {start for layer in layers for start in (layer.weight_start, layer.bias_start)}
    return Spans.of(selection, [name for name, where in selection.slices().items() if where.start not in covered])
