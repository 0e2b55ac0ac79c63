"""Σ_n S_n ⊗ h_n h'_nᵀ as matrix products, without forming a Jacobian.

For two linear layers with Jacobians V ⊗ hᵀ and V' ⊗ h'ᵀ, the information block is Σ_n S_n ⊗ h_n h'_nᵀ with
S_n = V_nᵀ Λ_n V'_n. Put the samples in the last dimension: the rows h_a ∘ h'_b times the rows S_ij is *one matrix
product* over the samples, and gives the block exactly. Prediction is the mirror image: Q_ij = Σ_ab P[ia, jb] h_a h'_b.

Within a layer both S and h hᵀ are symmetric, and only i ≤ j and a ≤ b are kept (*packed*). P is symmetric as a whole
but not in each pair of indices, so its packed coefficient is P[ia, jb] + P[ib, ja] for a < b, and P[ia, ja] for a = b.

The rows h_a ∘ h'_b are made a tile at a time, so that they are still in the cache when the product reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Bytes of one tile of rows, which should stay in the cache until it is multiplied; a GPU needs few large launches.
TILE_BYTES = {"cpu": 2**22, "cuda": 2**29}
# Float32 numbers of a vector register, and the number of columns below which it matters.
_VECTOR = 16
_NARROW = 256
# Below so many samples, and on a GPU, a tile is made by two gathers instead of one product for each a.
_FEW_SAMPLES = 8
# Fewer columns than the first, but more than one, are padded to the second before a product.
_NARROW_COLUMNS, _WIDE_COLUMNS = 12, 16
# Up to so many outputs all entries are expanded by one product; above, in pieces of so many numbers.
_FEW_OUTPUTS = 32
_EXPANDED_NUMBERS = 2**21


@lru_cache(maxsize=64)
def triangle(size: int, device: torch.device) -> tuple[Int[Tensor, "k"], Int[Tensor, "k"]]:
    """Indices (a, b), a ≤ b, in the order in which symmetric matrices are packed."""
    a, b = torch.triu_indices(size, size, device=device)
    return a, b


@lru_cache(maxsize=64)
def _all_pairs(p: int, q: int, device: torch.device) -> tuple[Int[Tensor, "k"], Int[Tensor, "k"]]:
    """Indices (a, b), all of them, row by row."""
    both = torch.arange(p * q, device=device)
    return both // q, both % q


@lru_cache(maxsize=64)
def unpack_index(size: int, device: torch.device) -> Int[Tensor, "size size"]:
    """Where entry (a, b) of a symmetric matrix lies in its packed form."""
    a, b = triangle(size, device)
    index = torch.empty(size, size, dtype=torch.long, device=device)
    index[a, b] = torch.arange(len(a), device=device)
    index[b, a] = index[a, b]
    return index


def product_rows(
    left: Float[Tensor, "p B"], right: Float[Tensor, "q B"] | None
) -> Iterator[tuple[int, int, Float[Tensor, "rows B"]]]:
    """Tiles of the rows left_a ∘ right_b, or left_a ∘ left_b with a ≤ b where `right` is None: (start, stop, tile)."""
    symmetric = right is None
    other = left if right is None else right
    p, samples = left.shape
    q = other.shape[0]
    total = p * (p + 1) // 2 if symmetric else p * q
    limit = max(q, TILE_BYTES.get(left.device.type, 2**20) // (samples * left.element_size()))
    # Rows in a buffer could not keep a graph.
    if samples <= _FEW_SAMPLES or left.device.type != "cpu" or left.requires_grad or other.requires_grad:
        first, second = triangle(p, left.device) if symmetric else _all_pairs(p, q, left.device)
        for start in range(0, total, limit):
            part = slice(start, min(start + limit, total))
            yield part.start, part.stop, left.index_select(0, first[part]).mul_(other.index_select(0, second[part]))
        return
    buffer = torch.empty(min(limit, total), samples, dtype=left.dtype, device=left.device)
    start = count = 0
    for a in range(p):
        partners = other[a:] if symmetric else other
        if count + len(partners) > len(buffer):
            yield start, start + count, buffer[:count]
            start, count = start + count, 0
        torch.mul(partners, left[a], out=buffer[count : count + len(partners)])
        count += len(partners)
    yield start, start + count, buffer[:count]


def add_products(
    total: Float[Tensor, "rows k"],
    weights: Float[Tensor, "k B"],
    left: Float[Tensor, "p B"],
    right: Float[Tensor, "q B"] | None,
) -> None:
    """total[ab, ij] += Σ_n h_a h'_b S_ij in place: products in the dtype of `weights`, the sum in float64."""
    columns = weights.T
    for start, stop, tile in product_rows(left, right):
        if weights.dtype == torch.float64:
            total[start:stop].addmm_(tile, columns)
        else:
            total[start:stop] += tile @ columns


def contract(
    coefficients: Float[Tensor, "rows k"], left: Float[Tensor, "p B"], right: Float[Tensor, "q B"] | None
) -> Float[Tensor, "k B"]:
    """Q_ij = Σ_ab coefficient[ab, ij] h_a h'_b for each sample.

    Products with two to eleven columns take longer than with sixteen (twice on the processors tried), so these are
    padded with columns of zeros.
    """
    samples = left.shape[1]
    if left.device.type == "cpu" and 1 < samples < _NARROW_COLUMNS:
        padding = (0, _WIDE_COLUMNS - samples)
        wide = None if right is None else torch.nn.functional.pad(right, padding)
        return contract(coefficients, torch.nn.functional.pad(left, padding), wide)[:, :samples]
    result: Tensor | None = None
    for start, stop, tile in product_rows(left, right):
        rows = coefficients[start:stop].T
        result = rows @ tile if result is None else result.addmm_(rows, tile)
    assert result is not None
    return result


def packed_weights(product: Float[Tensor, "B d e"], *, symmetric: bool) -> Float[Tensor, "k B"]:
    """S_ij with the samples in the last dimension; i ≤ j only where `symmetric`."""
    size, d, e = product.shape
    flat = product.reshape(size, d * e).T
    if symmetric:
        i, j = triangle(d, product.device)
        return flat.index_select(0, i * d + j)
    return flat.contiguous()


def padded(weights: Float[Tensor, "k B"]) -> Float[Tensor, "m B"]:
    """Padded with rows of zeros to a multiple of a vector register, without which narrow products are half as fast."""
    k = len(weights)
    missing = -k % _VECTOR if k < _NARROW else 0
    return torch.nn.functional.pad(weights, (0, 0, 0, missing)) if missing else weights


def expanded(
    block: Float[Tensor, "rows m"],
    left: Float[Tensor, "D d"] | None,
    right: Float[Tensor, "E e"] | None,
    D: int,
    E: int,
    *,
    symmetric: bool,
) -> Float[Tensor, "rows k"]:
    """Σ S ⊗ h h'ᵀ from a block of S = left C rightᵀ that was summed as C, without the padding of `padded`."""
    d, e = D if left is None else left.shape[1], E if right is None else right.shape[1]
    if symmetric:
        block = block[:, : d * (d + 1) // 2]
        if left is None:
            return block
        index = unpack_index(d, block.device)
        i, j = triangle(D, block.device)
        if d > _FEW_OUTPUTS:
            result = block.new_empty(len(block), len(i))
            step = max(1, _EXPANDED_NUMBERS // D**2)
            for start in range(0, len(block), step):
                whole = block[start : start + step].index_select(1, index.reshape(-1)).reshape(-1, d, d)
                result[start : start + step] = (left @ whole @ left.mT)[:, i, j]
            return result
        # What each packed entry of C becomes: left (unit matrix) leftᵀ, packed. One product does it, but D⁴ numbers.
        units = (index[None] == torch.arange(block.shape[1], device=block.device)[:, None, None]).to(block)
        return block @ (left @ units @ left.mT)[:, i, j]
    block = block[:, : d * e]
    if left is not None:
        block = torch.einsum("ic,rce->rie", left, block.reshape(-1, d, e)).flatten(1)
    if right is not None:
        block = torch.einsum("jc,rdc->rdj", right, block.reshape(-1, D, e)).flatten(1)
    return block


def unpacked_weights(packed: Float[Tensor, "k B"], d: int, e: int, *, symmetric: bool) -> Float[Tensor, "B d e"]:
    """The inverse of `packed_weights`."""
    # Each matrix in one piece: products of a batch of others copy them one by one.
    flat = packed.T.contiguous()
    if symmetric:
        flat = flat.index_select(1, unpack_index(d, packed.device).reshape(-1))
    return flat.reshape(-1, d, e)


def block_from_products(
    total: Float[Tensor, "rows k"], d: int, p: int, e: int, q: int, *, symmetric: bool
) -> Iterator[tuple[int, int, Float[Tensor, "p e q"]]]:
    """The block as (i, first j, entries [a, j, b]) for each output i; for a symmetric one only j ≥ i."""
    index = unpack_index(p, total.device).reshape(-1) if symmetric else None
    start = 0
    for i in range(d):
        count = d - i if symmetric else e
        columns = total[:, start : start + count]
        start += count
        rows = columns if index is None else columns.index_select(0, index)
        yield i, i if symmetric else 0, rows.reshape(p, q, count).transpose(1, 2)


def coefficients(
    covariance: Float[Tensor, "n n"], left: Int[Tensor, "d p"], right: Int[Tensor, "e q"] | None, dtype: torch.dtype
) -> Float[Tensor, "rows k"]:
    """The coefficients of Q_ij = Σ_ab P[ia, jb] h_a h'_b, packed where both layers are the same."""
    symmetric = right is None
    other = left if right is None else right
    d, p = left.shape
    e, q = other.shape
    rows = p * (p + 1) // 2 if symmetric else p * q
    packed = torch.empty(rows, d * (d + 1) // 2 if symmetric else d * e, dtype=dtype, device=covariance.device)
    a, b = triangle(p, covariance.device)
    start = 0
    for i in range(d):
        partners = other[i:] if symmetric else other
        count = len(partners)
        block = covariance[left[i]][:, partners.reshape(-1)].reshape(p, count, q)
        if symmetric:
            block = block.transpose(0, 1)
            # a = b is halved first, because the transpose counts it twice.
            entries = block[:, a, b] + block[:, b, a]
            entries[:, a == b] /= 2
            packed[:, start : start + count] = entries.T
        else:
            packed[:, start : start + count] = block.transpose(1, 2).reshape(p * q, count)
        start += count
    return packed
