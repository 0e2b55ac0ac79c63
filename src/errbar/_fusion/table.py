"""`FusionTable`: what `calibrate_fusion` compared, and what it took."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class FusionRow:
    """A way to fuse, and what it is worth out of fold: everything was fitted on the other folds.

    Attributes:
        name: in words.
        fitted: how many numbers were fitted.
        nll: mean −ln f_y, in nats per sample.
        difference: in NLL to the mean of the logits, paired, and
        standard_error: of that difference.
    """

    name: str
    fitted: int
    nll: float
    difference: float
    standard_error: float


@dataclass(frozen=True)
class FusionTable:
    """Baselines and variants, cross-validated; `chosen` is the name of the variant that was taken.

    `weights` are the mean shares tr(P Q_c⁻¹)/(M − 1) of the networks over the held-out inputs. `gains` say what each
    network adds: by how much the NLL out of fold rises without it, with T and q fitted again.
    """

    rows: tuple[FusionRow, ...]
    chosen: str
    reason: str
    weights: tuple[float, ...]
    gains: tuple[float, ...]
    inputs: int
    folds: int

    def row(self, name: str) -> FusionRow:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def described(self) -> dict[str, Any]:
        """The table in lists, mappings, numbers and texts, as files hold it."""
        networks = [{"weight": w, "gain": gain} for w, gain in zip(self.weights, self.gains, strict=True)]
        return {
            "rows": [asdict(row) for row in self.rows],
            "networks": networks,
            **{name: getattr(self, name) for name in ("chosen", "reason", "inputs", "folds")},
        }

    def cells(self) -> list[tuple[str, ...]]:
        """Headings and rows as texts; the last column marks what was chosen."""
        cells: list[tuple[str, ...]] = [("cross-validated", "fitted", "NLL", "against the mean of logits", "")]
        for row in self.rows:
            against = (
                "" if row.fitted == 1 and row.difference == 0 else f"{row.difference:+.4f} ± {row.standard_error:.4f}"
            )
            mark = "chosen" if row.name == self.chosen else ""
            cells.append((row.name, str(row.fitted), f"{row.nll:.4f}", against, mark))
        return cells

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 4) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, self.reason])
