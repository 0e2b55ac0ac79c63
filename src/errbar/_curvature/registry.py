"""The structures by name, from the most faithful to the least: the order in which `structure="auto"` tries them.

| structure | exact | information between | memory |
|---|---|---|---|
| dense | yes | all parameters | n² |
| block | within a layer | parameters of one layer | Σ n_l² |
| kron | no | inputs, and outputs, of one layer | Σ p_l² + d_l² |
| lowrank | up to a stated bound | all parameters, in k directions | k n |
| diag | no | nothing | n |

For a last layer alone with the `eta` Fisher, `dense` is exact with one matrix for each class (`_curvature.per_class`).
Several of them, each for some of the parameters, are a mixture (`_curvature.mixed`); `auto` tries one after `block`.
"""

from __future__ import annotations

from collections.abc import Mapping

from errbar._base.checks import require_option
from errbar._curvature.block import BlockStructure
from errbar._curvature.dense import DenseStructure
from errbar._curvature.diagonal import DiagonalStructure
from errbar._curvature.kronecker import KroneckerStructure
from errbar._curvature.lowrank import LowRankStructure
from errbar._curvature.mixed import MixedStructure
from errbar._curvature.mixture import Mixture, is_mixture
from errbar._curvature.structure import Structure
from errbar._model.selection import Selection

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
    """The structure of this name, or of the text of a mixture."""
    return MixedStructure(_mixture(name), _STRUCTURES) if is_mixture(name) else _STRUCTURES[name]


def require_structure(structure: object) -> str:
    """A structure as text: a name, "auto", or a mixture, given as a mapping or as text; `ArgumentError` otherwise."""
    if isinstance(structure, Mapping):
        return Mixture.of(structure, _can_be_mixed()).text
    if isinstance(structure, str) and is_mixture(structure):
        return _mixture(structure).text
    require_option("structure", structure, (*structure_names(), "auto"))
    return str(structure)


def structure_of(structure: str, selection: Selection) -> str:
    """The structure of selected parameters: that of all of them, where a mixture gives all the same."""
    if not is_mixture(structure):
        return structure
    assigned = _mixture(structure).assigned(selection.names)
    return next(iter(assigned)) if len(assigned) == 1 else structure


def faithfulness(structure: str) -> tuple[float, int]:
    """Sorts structures from the most faithful to the least.

    Mixtures come between `block` and `kron`, by how many of their keys say `kron`.
    """
    order = structure_names().index
    if is_mixture(structure):
        return order("kron") - 0.5, structure.count("=kron")
    return order(structure), 0


def _mixture(text: str) -> Mixture:
    return Mixture.parsed(text, _can_be_mixed())


def _can_be_mixed() -> tuple[str, ...]:
    return tuple(name for name, structure in _STRUCTURES.items() if structure.can_be_part)
