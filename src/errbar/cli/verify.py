"""`errbar verify`: whether a file is whole, and about the weights of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import errbar
from errbar.cli import options
from errbar.errors import MismatchError


def verify(
    file: options.FileArgument,
    model: Annotated[
        str | None, typer.Argument(metavar="[PACKAGE.MODULE:CALLABLE]", help="Returns the model of the fit.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", metavar="FILE", help="Its weights: .safetensors, .pt, .pth or .th.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Read and check all of a file; with a model, check that the file is about its weights."""
    from errbar.cli.models import model_of
    from errbar.cli.session import file_lines, session

    with session("verify", as_json=as_json) as here:
        try:
            description = errbar.verify(file, None if model is None else model_of(model, weights, here.device))
        except MismatchError as error:
            hint = " Give its weights with --weights." if weights is None else ""
            raise MismatchError(f"{error}{hint}") from error
        about = "" if model is None else f", and about the weights of {model}"
        here.answer({**asdict(description), "whole": True}, f"{file_lines(description)}\n{file} is whole{about}.")
