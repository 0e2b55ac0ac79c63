"""`errbar merge`: the information of several files in one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import errbar
from errbar.cli import options


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="Posteriors or information of the same weights.")
    ],
    output: options.Output,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PACKAGE.MODULE:CALLABLE", help="Its model, to make a posterior at once."),
    ] = None,
    weights: options.Weights = None,
    prior: options.PriorText = options.DEFAULT_PRIOR,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Add up the information of several files: with --model to a posterior with --prior, else without a prior."""
    from errbar.cli.models import model_of
    from errbar.cli.output import require_new
    from errbar.cli.posteriors import prior_of, require_prior, save
    from errbar.cli.session import session

    with session("merge", as_json=as_json, device=device) as here:
        require_new(output, force)
        require_prior(prior)
        classes = next((names for names in (errbar.info(file).classes for file in files) if names is not None), None)
        information = errbar.merge(files)
        if model is not None:
            information = information.with_model(model_of(model, weights, here.device))
            posterior = errbar.condition(information, prior_of(prior, None, information, progress=False))
            save(here, posterior, output, classes, {"files": len(files), "kind": "posterior"})
            return
        information.save(output, classes=classes)
        here.answer(
            {
                "output": output,
                "files": len(files),
                "kind": "information",
                "samples": information.n_samples,
                "parameters": information.n_parameters,
                "structure": information.structure,
                "bytes": output.stat().st_size,
            }
        )
