"""What surrounds a command: the job of torchrun, notices for warnings, and the answer, as tables or as JSON.

People read tables on standard output, and progress and notices on standard error. With --json, standard output is one
JSON object and nothing else. Of the ranks of a job only the first speaks and writes.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from errbar._curvature.mixture import described_structure
from errbar._distributed.team import Team, job_of_torchrun, team_of
from errbar._model.positions import IGNORE_INDEX
from errbar.cli.models import device_of
from errbar.errors import ArgumentError

if TYPE_CHECKING:
    from errbar import FileDescription, FusionDescription

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Session:
    """One command while it runs, on `device`; `progress` says whether to show some."""

    command: str
    as_json: bool
    progress: bool
    device: torch.device
    team: Team
    out: TextIO
    notices: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def together(self, step: Callable[[], Result]) -> Result:
        """What each rank does by itself; a mistake of one is a mistake of all, so that none waits in vain."""
        return self.team.together(step)

    def leading(self, step: Callable[[], None]) -> None:
        """What the first rank does for all, such as writing the file."""
        self.team.together(lambda: step() if self.team.leads else None)

    def answer(self, facts: Mapping[str, Any], printed: RenderableType | None = None) -> None:
        """Say what came out: all facts as JSON; for people what is to be printed, or the facts one a line."""
        if not self.team.leads:
            return
        if self.as_json:
            seconds = round(time.monotonic() - self.start, 3)
            whole = {"command": self.command, **facts, "seconds": seconds, "notices": self.notices}
            self.out.write(json.dumps(plain(whole), ensure_ascii=False, allow_nan=False) + "\n")
        elif isinstance(printed, str):
            self.out.write(printed + "\n")
        else:
            Console(file=self.out, highlight=False).print(facts_table(facts) if printed is None else printed)

    def require_one_process(self, work: str) -> None:
        """Refuse a job of torchrun where the command shares its work but not this part of it."""
        if not self.team.is_alone:
            raise ArgumentError(
                f"errbar {work} was started {self.team.size} times by torchrun; expected one process. Leave torchrun "
                "out."
            )

    def notice(self, text: str) -> None:
        """Something that the user should know and that stops nothing."""
        self.notices.append(text)
        if self.team.leads:
            sys.stderr.write(f"errbar: note: {text}\n")


@contextmanager
def session(
    command: str, *, as_json: bool, progress: bool = False, device: str = "cpu", ranks: bool = False
) -> Iterator[Session]:
    """Begin a command; `ranks` says whether several processes can share its work."""
    where = device_of(device)
    out = sys.stdout
    # What the user's code prints on the way is no part of the answer.
    aside = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with job_of_torchrun(where), warnings.catch_warnings(), aside:
        team = team_of()
        if not team.is_alone and not ranks:
            raise ArgumentError(
                f"errbar {command} was started {team.size} times by torchrun; expected one process. fit, calibrate, "
                "calibrate-fusion, predict, evaluate, outliers, update and forget share their work, this does not."
            )
        here = Session(command, as_json, progress and not as_json, where, team, out)
        # Warnings of the library are for the user, deprecations in what it depends on are not.
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_, **__: here.notice(str(message))
        yield here


def plain(value: Any) -> Any:
    """The same in lists, mappings, numbers and texts; null for numbers that are not finite, which JSON has not."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, (str, Path)) else value


def facts_table(facts: Mapping[str, Any]) -> Table:
    """One line for each fact that there is."""
    lines = Table(show_header=False, box=None, pad_edge=False)
    lines.add_column(style="bold", no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in facts.items():
        if value is not None:
            text = described_structure(value) if name == "structure" else value
            lines.add_row(name.replace("_", " "), shown(text))
    return lines


def file_lines(description: FileDescription | FusionDescription) -> str:
    """One line for each thing that a file says about itself; of a fusion also for each network."""
    lines = []
    for name, value in asdict(description).items():
        if name == "networks" or (name == "ignore_index" and value == IGNORE_INDEX):
            continue
        text: Any = ", ".join(map(str, value)) if name == "parameters" or isinstance(value, tuple) else value
        text = described_structure(value) if name == "structure" else text
        if name == "choice" and value is not None:
            text = value["reason"]
        if value is not None:
            lines.append(f"{name.replace('_', ' '):<17} {text}")
    for c, network in enumerate(getattr(description, "networks", ())):
        structure = described_structure(network.structure)
        about = f"{network.n_parameters:,} parameters, {structure}, {network.fisher}, {network.n_samples:g} samples"
        lines.append(f"{f'network {c}':<17} {about}, weights {network.weights}")
    return "\n".join(lines)


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Numbers under headings, the first column in words."""
    lines = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    lines.show_edge, lines.padding = False, (0, 1, 0, 0)
    for position, heading in enumerate(headings):
        lines.add_column(heading, justify="right" if position else "left", overflow="fold", no_wrap=not position)
    for row in rows:
        lines.add_row(*(shown(cell) for cell in row))
    return lines


def shown(value: Any) -> str:
    """A value in few characters."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        more = "" if len(value) <= 8 else f" and {len(value) - 8} more"
        return ", ".join(shown(part) for part in value[:8]) + more
    return escape(str(value))
