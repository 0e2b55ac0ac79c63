"""`errbar reproduce`: the experiments of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from errbar.cli import options


def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="mnist, cifar10, gtsrb, digits, resnet20, resnet32; fusion-mnist, …, fusion-resnets, frames-mnist, …; "
            "acquire-mnist, ….",
        ),
    ],
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder with the data sets; digits need none.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Folder for results, figures and trained networks.")
    ] = Path("reproduce-output"),
    seeds: Annotated[int | None, typer.Option(help="Number of runs; by default 5, or 3 for larger data.")] = None,
    only: Annotated[
        int | None,
        typer.Option(min=0, metavar="SEED", help="One run alone, to spread them; finished ones are put together."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small subset: the whole pipeline in a minute.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute, for example cuda.")] = "cpu",
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Repeat an experiment of the paper: train, compare the methods, fuse, clean, and draw the figures."""
    from errbar.cli.session import session
    from errbar.experiments.command import run

    with session("reproduce", as_json=as_json, progress=progress, device=device) as here:
        facts = run(
            experiment,
            data=data,
            output=output,
            seeds=seeds,
            quick=quick,
            device=device,
            progress=here.progress,
            only=only,
            quiet=as_json,
        )
        if as_json:
            here.answer(facts)
