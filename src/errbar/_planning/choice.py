"""Which structure fits into memory: the choice of `structure="auto"`, and a refusal that names what would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from errbar._base.memory import available_bytes, readable, usable_bytes
from errbar._curvature.fisher import Fisher
from errbar._curvature.workload import Cost, Structure, Workload
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Layer, Selection
from errbar._planning.costs import cost
from errbar._planning.layout import Layout, layout_of
from errbar.errors import SizeError

# From the most faithful to the least.
PREFERENCE: tuple[Structure, ...] = ("dense", "block", "kron", "lowrank", "diag")


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked of memory: parameters of a network, of which a survey was made, for batches of so many samples."""

    seen: Layout
    selection: Selection
    batch: int
    fisher: Fisher
    dtype: torch.dtype
    rank: int

    @staticmethod
    def of(
        network: Network,
        selection: Selection,
        batch: Batch,
        layers: tuple[Layer, ...],
        *,
        fisher: Fisher,
        dtype: torch.dtype,
        rank: int,
        size: int | None = None,
    ) -> Request:
        """By what `batch` shows, for batches of `size` samples; of as many as this one has, if that is not given."""
        return Request(layout_of(network, batch, layers), selection, size or len(batch), fisher, dtype, rank)

    def workload(self, selection: Selection) -> Workload:
        return self.seen.workload(selection, batch=self.batch, fisher=self.fisher, dtype=self.dtype, rank=self.rank)

    def cost(self, structure: Structure) -> Cost:
        return cost(structure, self.workload(self.selection))

    def best(self, device: torch.device) -> tuple[Structure, Cost]:
        """The first structure, in the order of preference, that fits; `SizeError` where none does."""
        usable = usable_bytes(device)
        work = self.workload(self.selection)
        costs = {structure: cost(structure, work) for structure in PREFERENCE}
        for structure, found in costs.items():
            if found.peak_bytes <= usable:
                return structure, found
        least = min(costs, key=lambda structure: costs[structure].peak_bytes)
        self._refuse(least, costs[least].peak_bytes, device, "No structure fits: even ")
        raise AssertionError("unreachable")

    def require(self, structure: Structure, device: torch.device) -> None:
        """Refuse what would not fit, before anything large is made."""
        needed = self.cost(structure).peak_bytes
        if needed > usable_bytes(device):
            self._refuse(structure, needed, device, "")

    def _refuse(self, structure: Structure, needed: int, device: torch.device, start: str) -> None:
        available = available_bytes(device)
        raise SizeError(
            f"{start}structure='{structure}' of {self.selection.n_parameters:,} parameters needs {readable(needed)} on "
            f"{device}, and {readable(available)} are available; {self._instead(structure, usable_bytes(device))}."
        )

    def _instead(self, structure: Structure, usable: int) -> str:
        """The best other structure for the same parameters, and the most layers for which the asked one fits."""

        def fits(structure: Structure, work: Workload) -> bool:
            return cost(structure, work).peak_bytes <= usable

        work = self.workload(self.selection)
        other = next((name for name in PREFERENCE if name != structure and fits(name, work)), None)
        layers = self._most_layers(lambda selection: fits(structure, self.workload(selection)))
        advice = [f"structure='{other}' ({readable(cost(other, work).peak_bytes)})"] if other else []
        advice += [f"last_layers={layers} with structure='{structure}'"] if layers else []
        if not advice:
            return "no other structure and no number of layers fits either, so use a machine with more memory"
        return f"what fits is {' or '.join(advice)}"

    def _most_layers(self, fits: Callable[[Selection], bool]) -> int:
        """The largest r, by bisection: more layers never cost less."""
        low, high = 0, self.seen.n_layers
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(self.seen.last(middle)) else (low, middle - 1)
        return low
