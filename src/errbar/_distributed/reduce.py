"""Sums over ranks of symmetric matrices, of which each rank sends one triangle.

Exact structures add up in float64: Σ over ranks is the same `+` as over batches.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._distributed.team import Team

# Bytes of a symmetric matrix that are sent at a time: long enough messages, and little memory beside the matrix.
_STRIP_BYTES = 2**23


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
