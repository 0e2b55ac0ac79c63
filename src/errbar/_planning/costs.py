"""What each structure costs in bytes and in multiplications; the formulas are in the structures' own files."""

from __future__ import annotations

from errbar._curvature import block, dense, diagonal, kronecker, lowrank, per_class
from errbar._curvature.workload import Cost, Structure, Workload


def cost(structure: Structure, work: Workload) -> Cost:
    """What a fit and predictions with `structure` take."""
    kinds = {
        "dense": per_class.cost if work.is_per_class else dense.cost,
        "block": block.cost,
        "kron": kronecker.cost,
        "lowrank": lowrank.cost,
        "diag": diagonal.cost,
    }
    return kinds[structure](work)
