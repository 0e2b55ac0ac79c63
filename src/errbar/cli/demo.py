"""`errbar demo`: all of it on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from errbar.cli import options


def demo(
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for the figures; made if missing.")
    ] = Path("demo-output"),
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Train on scikit-learn's digits, compare eight methods, fuse, assess risk, and draw the figures."""
    from errbar.cli.session import session
    from errbar.demo import run

    with session("demo", as_json=as_json, progress=progress) as here:
        facts = run(output, progress=here.progress, quiet=as_json)
        if as_json:
            here.answer(facts)
