"""`errbar info`: what a file says about itself."""

from __future__ import annotations

from dataclasses import asdict

import errbar
from errbar.cli import options


def info(file: options.FileArgument, as_json: options.Json = False) -> None:
    """Print what a file says about itself; only its header is read."""
    from errbar.cli.session import file_lines, session

    with session("info", as_json=as_json) as here:
        description = errbar.info(file)
        here.answer(asdict(description), file_lines(description))
