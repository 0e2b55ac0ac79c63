"""The sums of all ranks made one, and the same on each of them.

Exact structures add up in float64: Σ over ranks is the same `+` as over batches. Sketches are brought to the first rank
and merged there in the order of ranks, each merge adding its δ to the bound, and the result is sent to all. Nobody
else compresses, so that not even rounding can tell the ranks apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._curvature.block import BlockSum
from errbar._curvature.dense import DenseSum
from errbar._curvature.diagonal import DiagonalSum
from errbar._curvature.kronecker import KroneckerBlock, KroneckerSum
from errbar._curvature.lowrank import LowRankSum
from errbar._curvature.per_class import PerClassSum
from errbar._distributed.team import Team
from errbar._posterior.differentiate import Sum

# Rows of a symmetric matrix that are sent at a time: long enough messages, and little memory beside the matrix.
_STRIP_BYTES = 2**23


def reduced(total: Sum, has_data: Sequence[bool], team: Team) -> Sum:
    """Σ over the ranks of the sums of each; `has_data` says which of them have any. A collective call."""
    if isinstance(total, DenseSum):
        return _reduced_matrix(total, team)
    if isinstance(total, BlockSum):
        return BlockSum(total.blocks, tuple(_reduced_matrix(part, team) for part in total.totals))
    if isinstance(total, PerClassSum):
        return PerClassSum(total.layer, team.summed(total.totals))
    if isinstance(total, DiagonalSum):
        return DiagonalSum(team.summed(total.values))
    if isinstance(total, KroneckerSum):
        return _reduced_factors(total, team)
    return _merged_sketches(total, has_data, team)


def _reduced_matrix(total: DenseSum, team: Team) -> DenseSum:
    error = None if total.error is None else team.summed(total.error)
    return DenseSum(triangle_summed(total.matrix, team), error)


def triangle_summed(matrix: Float[Tensor, "n n"], team: Team) -> Float[Tensor, "n n"]:
    """Σ over the ranks of a symmetric matrix, of which the upper triangle alone is sent, in strips of rows."""
    n = len(matrix)
    whole = torch.empty_like(matrix)
    start = 0
    while start < n:
        stop = min(n, start + max(1, _STRIP_BYTES // (8 * (n - start))))
        strip = team.summed(matrix[start:stop, start:])
        whole[start:stop, start:] = strip
        whole[stop:, start:stop] = strip[:, stop - start :].T
        # The square on the diagonal holds both triangles; one of them decides.
        square = strip[:, : stop - start].triu()
        whole[start:stop, start:stop] = square + square.triu(1).T
        start = stop
    return whole


def _reduced_factors(total: KroneckerSum, team: Team) -> KroneckerSum:
    """A, G and the counts are sums; their product over the count is made of the sums of all ranks."""
    counts = team.exchange([block.count for block in total.blocks])
    blocks = tuple(
        KroneckerBlock.of(
            block.layer,
            triangle_summed(block.inner, team),
            triangle_summed(block.outer, team),
            sum(own[index] for own in counts),
        )
        for index, block in enumerate(total.blocks)
    )
    if not len(total.rest_spans):
        return replace(total, blocks=blocks)
    rest = DiagonalSum(team.summed(total.rest.values))
    return replace(total, blocks=blocks, rest=rest, rest_peak=float(rest.values.abs().max()))


def _merged_sketches(total: LowRankSum, has_data: Sequence[bool], team: Team) -> LowRankSum:
    """((rank 0 + rank 1) + rank 2) + …, made by the first rank, which holds two sketches at a time."""
    told = team.exchange((len(total.rows), total.bound))
    merged: LowRankSum | None = None
    for source, (count, bound) in enumerate(told):
        if has_data[source]:
            own = _room(total, count) if team.leads and source != 0 else total
            rows = team.brought_to_the_first(own.rows, source)
            diagonal = team.brought_to_the_first(own.diagonal, source)
            merged = team.together(_merge(merged, LowRankSum(rows, diagonal, bound, total.rank), team))
    count, bound = team.broadcast(None if merged is None else (len(merged.rows), merged.bound))
    result = _room(total, count) if merged is None else merged
    rows, diagonal = team.shared(result.rows, 0), team.shared(result.diagonal, 0)
    return LowRankSum(rows, diagonal, bound, total.rank)


def _merge(merged: LowRankSum | None, other: LowRankSum, team: Team) -> Callable[[], LowRankSum | None]:
    """What the first rank has to do with the next sketch, and the others have not."""
    if not team.leads:
        return lambda: None
    return lambda: other if merged is None else merged + other


def _room(like: LowRankSum, count: int) -> LowRankSum:
    """Room for a sketch of `count` rows from another rank."""
    rows = torch.empty(count, like.rows.shape[1], dtype=like.rows.dtype, device=like.device)
    return LowRankSum(rows, torch.empty_like(like.diagonal), 0.0, like.rank)
