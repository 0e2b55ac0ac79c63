"""What `errbar reproduce` prints and writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table as Printed

from errbar.experiments import figures, tables
from errbar.experiments.pretrained import DEPTHS, pretrained
from errbar.experiments.reproduce import Options, reproduce

_SHOWN = (
    "scores",
    "fitted",
    "outliers",
    "shift",
    "fusion",
    "decisions",
    "classifiers",
    "cleaning",
    "retraining",
    "cost",
)


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
) -> None:
    """Compute, then print the tables and draw the figures."""
    options = Options(experiment, data, output, seeds, quick, device, progress, only)
    result = pretrained(options) if experiment in DEPTHS else reproduce(options)
    console = Console(highlight=False)
    made = {name: tables.TABLES[name](result) for name in tables.available(result)}
    for name in _SHOWN:
        if name in made:
            console.print(_compact(made[name]))
    page = output / f"{options.stem}.md"
    page.write_text("\n\n".join(f"## {t.title}\n\n{t.markdown()}" for t in made.values()) + "\n", encoding="utf-8")
    path = output / f"{options.stem}.json"
    for drawn in figures.draw(json.loads(path.read_text(encoding="utf-8")), output):
        console.print(f"Drawn: {drawn}")
    console.print(f"Written: {path}\nAll tables, with deviations and intervals: {page}")


def _compact(table: tables.Table) -> Printed:
    """For a terminal: means alone, and short headings."""
    printed = Printed(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    printed.show_edge, printed.padding = False, (0, 1, 0, 0)
    for number, heading in enumerate(table.headings):
        printed.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    for row in table.rows:
        printed.add_row(row[0], *(re.sub(r" (±|\[).*", "", cell) for cell in row[1:]))
    return printed
