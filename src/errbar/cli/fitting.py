"""`errbar fit`, `calibrate`, `update`, `forget` and `merge`: from models and data to files of posteriors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

import errbar
from errbar._base.checks import Checks
from errbar._files.task import checked_classes
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar.cli import options
from errbar.cli.choices import FisherChoice, ObjectiveChoice, PrecisionChoice, ScaleChoice, StructureChoice
from errbar.cli.models import model_of
from errbar.cli.posteriors import Loaded, PosteriorRequest, described, prior_of, require_prior
from errbar.cli.session import Session, session
from errbar.cli.source import HELD_OUT, TRAINING, DataRequest, Source, class_names, first_inputs
from errbar.cli.writers import require_new
from errbar.errors import ArgumentError

# Inputs by which update and forget tell how much the error bars changed.
_COMPARED = 256


def fit(
    model: options.ModelArgument,
    data: options.DataArgument,
    output: options.Output,
    weights: options.Weights = None,
    last_layers: Annotated[
        int | None, typer.Option("--last-layers", min=1, help="The parameters of this many layers that run last.")
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameters", metavar="NAME", help="A module or parameter; all; trainable. Can be repeated."),
    ] = None,
    prior: options.PriorText = options.DEFAULT_PRIOR,
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", help="Of the training: a prior of this times the samples.")
    ] = None,
    fisher: options.Fisher = FisherChoice.GGN,
    structure: Annotated[
        StructureChoice, typer.Option("--structure", help="Of the covariance; auto is the most exact that fits.")
    ] = StructureChoice.AUTO,
    rank: options.Rank = 100,
    precision: options.Precision = PrecisionChoice.MODEL,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="FILE", help="Continue here after an interruption.")
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Batches between two checkpoints.")] = 100,
    factors: Annotated[bool, typer.Option("--factors", help="Save the factorisation too: loads at once.")] = False,
    class_names_: options.ClassNames = None,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """From a trained model and its training data to a posterior. Labels are not needed."""
    with session("fit", as_json=as_json, progress=progress, device=device, ranks=True) as here:

        def prepared() -> tuple[Any, Source]:
            if (last_layers is None) == (parameters is None):
                raise ArgumentError("Expected either --last-layers, for example 2, or --parameters, for example all.")
            require_prior(prior, weight_decay)
            if here.team.leads:
                require_new(output, force)
            names = class_names(class_names_)
            source = DataRequest(data, batch_size, transform, image_size).open(TRAINING, names)
            network = model_of(model, weights, here.device)
            _require_class_names(network, source)
            return network, source

        network, source = here.together(prepared)
        # One name alone may be "all" or "trainable".
        names = parameters[0] if parameters is not None and len(parameters) == 1 else parameters
        information = errbar.collect(
            network,
            here.together(source.loader),
            last_layers=last_layers,
            parameters=names,
            fisher=fisher.value,
            structure=structure.value,
            rank=rank,
            precision="float64" if precision is PrecisionChoice.FLOAT64 else None,
            checkpoint=checkpoint,
            every=every,
            progress=here.progress,
        )
        chosen = prior_of(prior, weight_decay, information, here.progress and here.team.leads)
        posterior = errbar.condition(information, chosen)
        evidence = None if information.log_likelihood is None else posterior.log_evidence()
        _save(here, posterior, output, source.classes, {"log_evidence": evidence}, factors=factors)


def calibrate(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    objective: Annotated[ObjectiveChoice, typer.Option("--objective", help="What to minimise.")] = ObjectiveChoice.NLL,
    only: Annotated[ScaleChoice | None, typer.Option("--only", help="Fit this alone; without it both.")] = None,
    samples: options.Samples = 1000,
    seed: options.Seed = 0,
    factors: Annotated[bool, typer.Option("--factors", help="Save the factorisation too: loads at once.")] = False,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
    progress: options.Progress = True,
) -> None:
    """Temperature and covariance scale from held-out data with labels."""
    with session("calibrate", as_json=as_json, progress=progress, device=device, ranks=True) as here:
        asked = PosteriorRequest(posterior, model, weights)
        given = DataRequest(data, batch_size, transform, image_size)
        loaded, source = _opened(here, asked, given, HELD_OUT, output, force)
        wanted = tuple(scale.value.replace("-", "_") for scale in ([only] if only is not None else ScaleChoice))
        calibrated = errbar.calibrate(
            loaded.posterior,
            here.together(source.loader),
            objective=objective.value,
            fit=wanted,
            samples=samples,
            seed=seed,
            progress=here.progress,
        )
        _save(here, calibrated, output, loaded.classes, {}, factors=factors)


def update(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    discount: Annotated[
        float, typer.Option("--discount", min=0.0, max=1.0, help="What earlier data still count, where things drift.")
    ] = 1.0,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """The posterior after more data: their information counts, the weights do not move."""
    with session("update", as_json=as_json, device=device, ranks=True) as here:
        asked = PosteriorRequest(posterior, model, weights)
        given = DataRequest(data, batch_size, transform, image_size)
        loaded, source = _opened(here, asked, given, TRAINING, output, force)
        before = loaded.posterior
        discounted = before
        if discount < 1:
            kept = errbar.condition(before.information * discount, before.prior)
            discounted = kept.with_calibration(temperature=before.temperature, covariance_scale=before.covariance_scale)
        compared = here.together(lambda: first_inputs(source.loader(), _COMPARED))
        after = discounted.update(here.together(source.loader))
        _save(here, after, output, loaded.classes, _change(before, after, compared))


def forget(
    posterior: options.PosteriorArgument,
    data: options.DataArgument,
    model: options.Model,
    output: options.Output,
    weights: options.Weights = None,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """The posterior without some of its data. This is not unlearning: the weights do not move."""
    with session("forget", as_json=as_json, device=device, ranks=True) as here:
        asked = PosteriorRequest(posterior, model, weights)
        given = DataRequest(data, batch_size, transform, image_size)
        loaded, source = _opened(here, asked, given, TRAINING, output, force)
        compared = here.together(lambda: first_inputs(source.loader(), _COMPARED))
        after = loaded.posterior.forget(here.together(source.loader))
        _save(here, after, output, loaded.classes, _change(loaded.posterior, after, compared))


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
    """Add up the information of several files. With --model a posterior with --prior, else information without one."""
    with session("merge", as_json=as_json, device=device) as here:
        require_new(output, force)
        require_prior(prior)
        names = next((found for found in (errbar.info(file).classes for file in files) if found is not None), None)
        information = errbar.merge(files)
        if model is not None:
            information = information.with_model(model_of(model, weights, here.device))
            posterior = errbar.condition(information, prior_of(prior, None, information, progress=False))
            _save(here, posterior, output, names, {"files": len(files), "kind": "posterior"})
            return
        information.save(output, classes=names)
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


def _require_class_names(model: nn.Module, source: Source) -> None:
    """Refuse names that are not as many as the outputs of the model, before all data are read."""
    batch = next(iter(first_inputs(source.loader(), 1)), None) if source.classes is not None else None
    if batch is not None:
        network = Network(model)
        checks = Checks(network.device)
        outputs = network.logits(network.prepare(batch, checks)).shape[1]
        checks.finish()
        checked_classes(source.classes, outputs)


def _opened(
    here: Session, asked: PosteriorRequest, given: DataRequest, splits: Sequence[str], output: Path, force: bool
) -> tuple[Loaded, Source]:
    """The posterior and the data, once it is certain that the result can be written."""

    def opened() -> tuple[Loaded, Source]:
        if here.team.leads:
            require_new(output, force)
        loaded = asked.load(here.device)
        return loaded, given.open(splits, loaded.classes)

    return here.together(opened)


def _save(
    here: Session,
    posterior: errbar.Posterior,
    output: Path,
    classes: tuple[str, ...] | None,
    facts: dict[str, Any],
    *,
    factors: bool = False,
) -> None:
    here.leading(lambda: posterior.save(output, factors=factors, classes=classes))
    if here.team.leads:
        here.answer({"output": output, **described(posterior, classes), **facts, "bytes": output.stat().st_size})


def _change(before: errbar.Posterior, after: errbar.Posterior, compared: list[Batch]) -> dict[str, float]:
    """The mean variance of the logits' contrasts of some of the inputs, before and after, and how it changed."""
    first, second = (
        float(torch.cat([posterior.unrounded_logits(batch).contrast_variance for batch in compared]).mean())
        for posterior in (before, after)
    )
    return {
        "mean_variance_before": first,
        "mean_variance_after": second,
        "mean_variance_change": second / first - 1 if first else 0.0,
    }
