"""The mixture of `block` and `kron` that `structure="auto"` takes where neither `dense` nor `block` fits.

Modules are exact from the smallest on (norms, biases, small heads), as many as fit into memory and do not take longer
than the passes through the network, which any structure needs; those that remain, wide linear layers and convolutions,
take `kron`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from errbar._curvature.layout import Layout
from errbar._curvature.mixture import REST, is_mixture
from errbar._curvature.registry import require_structure, structure_called, structure_of
from errbar._curvature.structure import planned_cost
from errbar._curvature.workload import Workload
from errbar._model.selection import Selection, owner
from errbar.errors import ArgumentError

# Exact blocks may take so many times the multiplications of the passes of a sample, forward and backward; or, for small
# networks, so many for a sample; and so many once, in all.
_SHARE_OF_PASSES = 2
_FEW_PRODUCTS = 1e8
_MOST_ONCE = 3e12


def mixture_that_fits(work: Workload, layout: Layout, limit: int) -> str | None:
    """The mixture with the most exact modules within `limit` bytes; None where all of them are, or none can be."""
    if any(planned_cost(structure_called(name), work).peak_bytes <= limit for name in ("dense", "block")):
        return None
    modules = [module for module, _ in sorted(work.modules, key=lambda pair: (pair[1], pair[0]))]
    keys = _keys(work.names)

    def text(count: int) -> str:
        """`block` for so many modules, the smallest, and `kron` for the others."""
        wide = [key for module in modules[count:] for key in keys[module]]
        return require_structure(dict.fromkeys(wide, "kron") | {REST: "block"})

    most_products = max(_FEW_PRODUCTS, _SHARE_OF_PASSES * _pass_products(work, layout))

    def fits(count: int) -> bool:
        few = set(modules[:count])
        exact = {name for name in work.names if owner(name) in few}
        alone = planned_cost(structure_called("block"), work.of_names(exact))
        if alone.sample_products > most_products or alone.once_products > _MOST_ONCE:
            return False
        return planned_cost(structure_called(text(count)), work).peak_bytes <= limit

    # More exact modules never cost less.
    low, high = 0, len(modules) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return text(low) if low else None


def mixtures_of(structure: str | Mapping[str, str] | None, selections: Sequence[Selection]) -> list[str | None]:
    """A mixture that is given, for each of the selections that it divides; one for the last of them at least."""
    if structure is None or not is_mixture(text := require_structure(structure)):
        return [None] * len(selections)
    found: list[str | None] = []
    refusal: ArgumentError | None = None
    for selection in selections:
        try:
            found.append(text if is_mixture(structure_of(text, selection)) else None)
        except ArgumentError as error:
            found.append(None)
            refusal = error
    if refusal is not None and not any(found):
        raise refusal
    return found


def _pass_products(work: Workload, layout: Layout) -> float:
    """Multiplications of one pass forward, and of one backward, twice as many, for each seed."""
    forward = sum(layer.outputs * layer.inputs * layout.uses.get(layer.name, 0) for layer in layout.layers)
    return float(forward * (1 + 2 * (work.scores or work.classes)))


def _keys(names: Sequence[str]) -> dict[str, list[str]]:
    """What a mixture calls the parameters that each module owns: by the module, or by their own names.

    A module with parameters of its own beside those of other modules inside it has no name for its own.
    """
    own: dict[str, list[str]] = {}
    inside: Counter[str] = Counter()
    for name in names:
        own.setdefault(owner(name), []).append(name)
        parts = name.split(".")
        inside.update(".".join(parts[:count]) for count in range(1, len(parts)))
    return {module: [module] if inside[module] == len(mine) else mine for module, mine in own.items()}
