"""Matrices as arrays of a file, and back: triangles of symmetric ones, with their memory layout.

Products of a matrix and of its transposed copy may round differently, and a loaded posterior must predict the same as
the saved one to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar.errors import DamagedFileError

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
    matrix = flat.new_zeros(*flat.shape[:-1], n, n)
    _fill(matrix, flat, by_columns)
    return matrix.mT if by_columns else matrix


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


def _fill(matrix: Float[Tensor, "*B n n"], flat: Float[Tensor, "*B k"], by_columns: bool) -> None:
    start = 0
    for index, (first, last) in enumerate(_stretches(matrix.shape[-1], by_columns)):
        matrix[..., index, first:last] = flat[..., start : start + last - first]
        start += last - first


def _tiles(n: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the tiles on and below the diagonal."""
    for start in range(0, n, _TILE):
        for left in range(0, start + 1, _TILE):
            yield slice(start, min(start + _TILE, n)), slice(left, min(left + _TILE, n))


def read_jitter(fields: Fields) -> float:
    return float(fields.number("jitter", least=0))


def read_positive(contents: Contents, name: str, *shape: int) -> Tensor:
    values = contents.tensor(name, *shape)
    if not bool((values > 0).all()):
        raise DamagedFileError(f"{contents.path} has precisions in '{name}' that are not positive.")
    return values


def positive_diagonal(lower: Float[Tensor, "*B n n"], contents: Contents) -> Float[Tensor, "*B n n"]:
    if not bool((torch.diagonal(lower, dim1=-2, dim2=-1) > 0).all()):
        raise DamagedFileError(f"{contents.path} has a Cholesky factor whose diagonal is not positive.")
    return lower
