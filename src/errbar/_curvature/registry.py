"""The structures by name, from the most faithful to the least: the order in which `structure="auto"` tries them.

| structure | exact | information between | memory |
|---|---|---|---|
| dense | yes | all parameters | n² |
| block | within a layer | parameters of one layer | Σ n_l² |
| kron | no | inputs, and outputs, of one layer | Σ p_l² + d_l² |
| lowrank | up to a stated bound | all parameters, in k directions | k n |
| diag | no | nothing | n |

For a last layer alone with the `eta` Fisher, `dense` is exact with one matrix for each class (`_curvature.per_class`).
"""

from __future__ import annotations

from errbar._curvature.block import BlockStructure
from errbar._curvature.dense import DenseStructure
from errbar._curvature.diagonal import DiagonalStructure
from errbar._curvature.kronecker import KroneckerStructure
from errbar._curvature.lowrank import LowRankStructure
from errbar._curvature.structure import Structure

_STRUCTURES: dict[str, Structure] = {
    structure.name: structure
    for structure in (DenseStructure(), BlockStructure(), KroneckerStructure(), LowRankStructure(), DiagonalStructure())
}


def register(structure: Structure) -> None:
    """Add a structure under its name, after all existing ones."""
    _STRUCTURES[structure.name] = structure


def structure_names() -> tuple[str, ...]:
    return tuple(_STRUCTURES)


def structure_called(name: str) -> Structure:
    return _STRUCTURES[name]
