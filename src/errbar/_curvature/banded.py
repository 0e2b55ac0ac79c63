"""The sums of `packed` for a layer with many inputs and few outputs, with less memory traffic.

`packed` makes p(p+1)/2 rows h_a ∘ h_b per sample. Where the k pairs of outputs are fewer than (p+1)/2, it is cheaper to
scale h by each weight: Σ_n S_k h hᵀ is, for a *band* of consecutive a and all b not below its first, one product of the
rows S_k h_a with hᵀ. The part of a band below the diagonal is wasted, so bands are narrow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._curvature.packed import unpack_index

# Rows of a band: fewer waste less below the diagonal, more make larger products.
ROWS = 16
# Samples that are scaled at a time: the scaled rows should stay in the cache until they are multiplied.
TILE_SAMPLES = 1024

# Band s … e−1 of k symmetric matrices, columns s … p−1: [k, e−s, p−s].
Bands = list[Float[Tensor, "k _ _"]]


def suits(p: int, k: int) -> bool:
    """Whether k·p scaled rows are fewer than p(p+1)/2 products."""
    return 2 * k < p + 1


def suits_outputs(p: int, outputs: int) -> bool:
    """The same for all pairs of so many outputs."""
    return suits(p, outputs * (outputs + 1) // 2)


def _spans(p: int) -> list[tuple[int, int]]:
    return [(start, min(start + ROWS, p)) for start in range(0, p, ROWS)]


def zeros(p: int, k: int, device: torch.device) -> Bands:
    return _empty(p, k, torch.float64, device, torch.zeros)


def _empty(
    p: int, k: int, dtype: torch.dtype, device: torch.device, make: Callable[..., Tensor] = torch.empty
) -> Bands:
    """All bands in one block of memory, which is returned to the system as a whole."""
    shapes = [(k, stop - start, p - start) for start, stop in _spans(p)]
    sizes = [rows * columns * k for _, rows, columns in shapes]
    whole = make(sum(sizes), dtype=dtype, device=device)
    return [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]


def add_products(totals: Bands, weights: Float[Tensor, "k B"], rows: Float[Tensor, "p B"]) -> None:
    """totals[k, a, b] += Σ_n S_k h_a h_b in place: products in the dtype of `weights`, the sum in float64.

    The products of all tiles of samples are added up in their own dtype while the band is in the cache; the sums, which
    are not, are read and written once.
    """
    k, (p, samples) = len(weights), rows.shape
    tile = TILE_SAMPLES if weights.device.type == "cpu" else samples
    # Copies, because rows at a distance of a power of two collide in the cache.
    tiles = [(w.contiguous(), h.contiguous()) for w, h in zip(weights.split(tile, 1), rows.split(tile, 1), strict=True)]
    buffer = torch.empty(k * ROWS * min(tile, samples), dtype=weights.dtype, device=weights.device)
    products = torch.empty(k * ROWS * p, dtype=weights.dtype, device=weights.device)
    for total, (start, stop) in zip(totals, _spans(p), strict=True):
        product = products[: total.numel()].view(k * (stop - start), p - start)
        for number, (weight, row) in enumerate(tiles):
            scaled = buffer[: k * (stop - start) * row.shape[1]].view(k, stop - start, row.shape[1])
            torch.mul(weight[:, None], row[start:stop], out=scaled)
            torch.addmm(product, scaled.flatten(0, 1), row[start:].T, beta=float(number > 0), out=product)
        total += product.view_as(total)


def contract(coefficients: Bands, rows: Float[Tensor, "p B"]) -> Float[Tensor, "k B"]:
    """Q_k = Σ_ab coefficient[k, a, b] h_a h_b for each sample."""
    p, samples = rows.shape
    result = torch.zeros(len(coefficients[0]), samples, dtype=rows.dtype, device=rows.device)
    for band, (start, stop) in zip(coefficients, _spans(p), strict=True):
        product = (band.flatten(0, 1) @ rows[start:]).view(len(band), stop - start, samples)
        result += product.mul_(rows[start:stop]).sum(1)
    return result


def to_packed(bands: Bands) -> Float[Tensor, "rows k"]:
    """The entries a ≤ b in the order of `packed.triangle`."""
    k, _, p = bands[0].shape
    packed = torch.empty(p * (p + 1) // 2, k, dtype=bands[0].dtype, device=bands[0].device)
    start = 0
    for band in bands:
        a, b = torch.triu_indices(band.shape[1], band.shape[2], device=band.device)
        packed[start : start + len(a)] = band[:, a, b].T
        start += len(a)
    return packed


def from_packed(packed: Float[Tensor, "rows k"], p: int) -> Bands:
    """Bands with the packed entries on and above the diagonal, and zero below it."""
    bands = _empty(p, packed.shape[1], packed.dtype, packed.device)
    for band, (start, stop) in zip(bands, _spans(p), strict=True):
        band.copy_(packed[unpack_index(p, packed.device)[start:stop, start:]].permute(2, 0, 1)).triu_()
    return bands
