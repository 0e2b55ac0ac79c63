"""`errbar verify`: whether a file is whole, and about the weights of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError, MismatchError


def verify(
    file: options.FileArgument,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PACKAGE.MODULE:CALLABLE]...",
            help="Returns the model of the fit; one for each network that is fused.",
        ),
    ] = None,
    weights: Annotated[
        list[Path] | None,
        typer.Option("--weights", metavar="FILE", help="Its weights: .safetensors, .pt, .pth or .th; one for each."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Read and check all of a file; with a model, check that the file is about its weights."""
    from errbar.cli.models import model_of
    from errbar.cli.session import file_lines, session

    with session("verify", as_json=as_json) as here:
        names = model or []
        if weights and len(weights) != len(names):
            raise ArgumentError(
                f"There are {len(names)} models and {len(weights)} weights; expected --weights for each or for none."
            )
        each: Sequence[Path | None] = weights or [None] * len(names)
        models = [model_of(name, own, here.device) for name, own in zip(names, each, strict=True)]
        try:
            description = errbar.verify(file, models if len(models) > 1 else next(iter(models), None))
        except MismatchError as error:
            hint = "" if weights else " Give its weights with --weights."
            raise MismatchError(f"{error}{hint}") from error
        about = "" if not names else f", and about the weights of {', '.join(names)}"
        here.answer({**asdict(description), "whole": True}, f"{file_lines(description)}\n{file} is whole{about}.")
