"""`errbar fit`: from a model and its training data to a posterior."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError

if TYPE_CHECKING:
    from torch import nn

    from errbar.cli.inputs import Source


# What autofit chooses, what it has for classes alone, and what only it uses, by the names of the arguments below.
_CHOSEN = (
    "last_layers",
    "parameters",
    "prior",
    "weight_decay",
    "fisher",
    "draws",
    "structure",
    "rank",
    "precision",
)
_NOT_FOR_AUTO = ("outputs", "ignore_index")
_FOR_AUTO = ("validation", "seconds")


def fit(
    context: typer.Context,
    model: options.ModelArgument,
    data: options.DataArgument,
    output: options.Output,
    weights: options.Weights = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Choose everything on held-out data: the same as errbar autofit.")
    ] = False,
    validation: options.Validation = None,
    seconds: options.Seconds = None,
    last_layers: Annotated[
        int | None, typer.Option("--last-layers", min=1, help="The parameters of this many layers that run last.")
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option(
            "--parameters", metavar="NAME", help="A module or parameter; all; trainable; vectors. Repeatable."
        ),
    ] = None,
    prior: options.PriorText = options.DEFAULT_PRIOR,
    weight_decay: Annotated[
        float | None,
        typer.Option("--weight-decay", help="Weight decay of the training; the prior is this times the samples."),
    ] = None,
    outputs: options.Outputs = "classes",
    ignore_index: options.IgnoreIndex = None,
    fisher: options.Fisher = "ggn",
    draws: options.LabelDraws = 1,
    seed: options.Seed = 0,
    structure: options.Structure = "auto",
    rank: options.Rank = 100,
    precision: options.Precision = "model",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", metavar="FILE", help="Save progress here, and continue from it after an interruption."
        ),
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Batches between two checkpoints.")] = 100,
    factors: options.Factors = False,
    class_names_: options.ClassNames = None,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Fit a posterior to a trained model and its training data. Labels are not needed."""
    from errbar._model.positions import IGNORE_INDEX
    from errbar._posterior.width import INPUTS, warn_of_width
    from errbar.cli.autofit import Request, run
    from errbar.cli.inputs import TRAINING, DataRequest, class_names, first_inputs
    from errbar.cli.models import reproducible_model_of, require_class_names
    from errbar.cli.output import require_new
    from errbar.cli.posteriors import prior_of, require_prior, save
    from errbar.cli.session import session

    with session("fit", as_json=as_json, progress=progress, device=device, ranks=True) as here:
        _require_together(context, auto)
        data_request = DataRequest(data, batch_size, transform, image_size)
        if auto:
            asked = Request(
                model,
                weights,
                data_request,
                validation,
                output=output,
                force=force,
                class_names=class_names_,
                factors=factors,
                seconds=seconds,
                seed=seed,
            )
            run(here, asked)
            return

        def prepared() -> tuple[nn.Module, Source]:
            if (last_layers is None) == (parameters is None):
                raise ArgumentError("Expected either --last-layers, for example 2, or --parameters, for example all.")
            require_prior(prior, weight_decay)
            _require_positions(ignore_index, outputs)
            if here.team.leads:
                require_new(output, force)
            source = data_request.open(TRAINING, class_names(class_names_, outputs))
            network = reproducible_model_of(model, weights, here.device)
            require_class_names(network, source, outputs)
            return network, source

        network, source = here.together(prepared)
        # One name alone may be "all", "trainable" or "vectors".
        names = parameters[0] if parameters is not None and len(parameters) == 1 else parameters
        information = errbar.collect(
            network,
            here.together(source.loader),
            last_layers=last_layers,
            parameters=names,
            outputs=outputs,
            ignore_index=IGNORE_INDEX if ignore_index is None else ignore_index,
            fisher=fisher,
            draws=draws,
            seed=seed,
            structure=structure,
            rank=rank,
            precision=options.precision_of(precision),
            checkpoint=checkpoint,
            every=every,
            progress=here.progress,
        )
        prior_value = prior_of(prior, weight_decay, information, here.progress and here.team.leads)
        posterior = errbar.condition(information, prior_value)
        first = here.together(lambda: first_inputs(source.loader(), INPUTS) if here.team.leads else [])
        warn_of_width(posterior, first[0] if first else None, here.team)
        evidence = None if information.log_likelihood is None else posterior.log_evidence()
        save(here, posterior, output, source.classes, {"log_evidence": evidence}, factors=factors)


def _require_positions(ignore_index: int | None, outputs: str) -> None:
    """Refuse a label to ignore where every input has one."""
    if ignore_index is not None and outputs != "positions":
        raise ArgumentError(
            f"--ignore-index is {ignore_index} with --outputs {outputs}; expected it with --outputs positions, where "
            "some have no label. Leave it out."
        )


def _require_together(context: typer.Context, auto: bool) -> None:
    """Refuse options that would be ignored: autofit chooses what they say, or only autofit uses them."""
    for name in (*_CHOSEN, *_NOT_FOR_AUTO, "checkpoint", "every") if auto else _FOR_AUTO:
        source = context.get_parameter_source(name)
        # By name: typer may bring a click of its own.
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            if name in _NOT_FOR_AUTO:
                raise ArgumentError(
                    f"{option} was given with --auto, which is for one of M classes alone; expected errbar fit without "
                    "--auto, and then errbar calibrate."
                )
            raise ArgumentError(
                f"{option} was given with --auto, which chooses it; expected one of the two."
                if auto
                else f"{option} was given without --auto; expected --auto with it, or errbar autofit."
            )
