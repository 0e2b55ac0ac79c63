"""What `errbar reproduce` prints and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as Printed

from errbar._base.atomic import write_file
from errbar.experiments import acquiring, figures, tables
from errbar.experiments.fusions import NAMES, fusions
from errbar.experiments.pretrained import DEPTHS, pretrained
from errbar.experiments.reproduce import reproduce
from errbar.experiments.runs import RunOptions

_SHOWN = (
    "scores",
    "fitted",
    "outliers",
    "shift",
    "structures",
    "fusion",
    "decisions",
    "classifiers",
    "cleaning",
    "retraining",
    "cost",
    "fused",
    "chosen",
    "tracks",
    "change",
    "acquisition",
)

_WIDTH = 79


def run(
    experiment: str,
    *,
    data: Path | None,
    output: Path,
    seeds: int | None,
    quick: bool,
    device: str,
    progress: bool,
    only: int | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Compute, then print the tables (unless `quiet`) and draw the figures; returns tables and files by name."""
    options = RunOptions(experiment, data, output, seeds, quick, device, progress, only)
    result = _computation(experiment)(options)
    console = Console(highlight=False, quiet=quiet)
    results = {name: tables.TABLES[name](result) for name in tables.available(result)}
    for name in _SHOWN:
        if name in results:
            console.print(_compact(results[name]))
    page = output / f"{options.stem}.md"
    text = "\n\n".join(f"## {t.title}\n\n{t.markdown()}" for t in results.values()) + "\n"
    write_file(page, text.encode())
    path = output / f"{options.stem}.json"
    figure_paths = figures.draw(json.loads(path.read_text(encoding="utf-8")), output)
    for figure in figure_paths:
        console.print(f"Drawn: {figure}")
    console.print(f"Written: {path}\nAll tables, with deviations and intervals: {page}")
    table_values = {name: {"headings": t.headings, "rows": t.rows} for name, t in results.items()}
    return {"experiment": experiment, "result": path, "page": page, "figures": figure_paths, "tables": table_values}


def _computation(experiment: str) -> Callable[[RunOptions], dict[str, Any]]:
    if experiment in acquiring.NAMES:
        return acquiring.acquisitions
    return pretrained if experiment in DEPTHS else fusions if experiment in NAMES else reproduce


def _compact(table: tables.Table) -> Printed:
    """For a terminal of 80 columns: means alone, and no more of them than fit."""
    grid = Printed(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    grid.show_edge, grid.padding = False, (0, 1, 0, 0)
    rows = [(row[0], *(re.sub(r" (±|\[).*", "", cell) for cell in row[1:])) for row in table.rows]
    total_width = max(len(row[0]) for row in rows)
    grid.add_column(table.headings[0], no_wrap=True)
    count = 1
    for number, heading in enumerate(table.headings[1:], start=1):
        width = max(len(text) for text in (*heading.split(), *(row[number] for row in rows)))
        total_width += 3 + width
        if total_width > _WIDTH:
            break
        grid.add_column(heading, justify="right", min_width=width)
        count += 1
    for row in rows:
        grid.add_row(*row[:count])
    return grid
