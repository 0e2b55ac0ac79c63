"""`errbar autofit`: the best error bars for a model, chosen on held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError, DataError, FileError

if TYPE_CHECKING:
    from torch import nn

    from errbar.cli.inputs import DataRequest, Source
    from errbar.cli.session import Session

_WHOLE = ("last_layers", "rank", "draws")


def autofit(
    model: options.ModelArgument,
    data: options.DataArgument,
    output: options.Output,
    weights: options.Weights = None,
    validation: options.Validation = None,
    candidate: Annotated[
        list[str] | None,
        typer.Option(
            "--candidate",
            metavar="NAME=VALUE,…",
            help="Try this instead of the usual ones: last-layers=2,structure=kron or parameters=vectors. Repeatable.",
        ),
    ] = None,
    memory: options.Memory = None,
    seconds: options.Seconds = None,
    folds: Annotated[int, typer.Option("--folds", min=2, help="Folds of the cross-validation.")] = 5,
    groups: Annotated[
        Path | None,
        typer.Option(
            "--groups",
            metavar="FILE",
            help="An .npy with one value for each held-out sample; samples of equal value stay in one fold.",
        ),
    ] = None,
    seed: options.Seed = 0,
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
    """Try several posteriors, and save the best; never one that is worse than temperature scaling."""
    from errbar.cli.inputs import DataRequest
    from errbar.cli.session import session

    with session("autofit", as_json=as_json, progress=progress, device=device, ranks=True) as here:
        request = Request(
            model=model,
            weights=weights,
            data=DataRequest(data, batch_size, transform, image_size),
            validation=validation,
            output=output,
            force=force,
            class_names=class_names_,
            candidates=candidate,
            memory=memory,
            seconds=seconds,
            folds=folds,
            groups=groups,
            seed=seed,
            factors=factors,
        )
        run(here, request)


@dataclass(frozen=True)
class Request:
    """An autofit as it was typed."""

    model: str
    weights: Path | None
    data: DataRequest
    validation: str | None
    output: Path
    force: bool
    class_names: str | None = None
    candidates: list[str] | None = None
    memory: str | None = None
    seconds: float | None = None
    folds: int = 5
    groups: Path | None = None
    seed: int = 0
    factors: bool = False


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What was typed, checked."""

    network: nn.Module
    training: Source
    held_out: Source
    options: dict[str, Any]


def run(here: Session, request: Request) -> None:
    """Choose, save and print. Everything that was typed is checked before anything is computed."""
    from errbar.cli.posteriors import save_choice

    prepared = here.together(lambda: _prepared(here, request))
    training, held_out = here.together(lambda: (prepared.training.loader(), prepared.held_out.loader()))
    choice = errbar.autofit(prepared.network, training, held_out, progress=here.progress, **prepared.options)
    save_choice(here, choice, request.output, prepared.training.classes, factors=request.factors)


def _prepared(here: Session, request: Request) -> _Prepared:
    from errbar._choosing.candidates import listed_candidates
    from errbar.cli.inputs import TRAINING, class_names
    from errbar.cli.models import reproducible_model_of, require_class_names
    from errbar.cli.output import require_new
    from errbar.cli.plan import byte_count

    if request.seconds is not None and not 0 < request.seconds < float("inf"):
        raise ArgumentError(f"--seconds is {request.seconds:g}; expected a positive number.")
    candidates = None if not request.candidates else [candidate_of(text) for text in request.candidates]
    listed_candidates(candidates)
    memory = None if request.memory is None else byte_count(request.memory)
    if here.team.leads:
        require_new(request.output, request.force)
    training = request.data.open(TRAINING, class_names(request.class_names))
    held_out = _held_out(request, training)
    groups = None if request.groups is None else _groups(here, request.groups, held_out)
    network = reproducible_model_of(request.model, request.weights, here.device)
    require_class_names(network, training)
    return _Prepared(
        network,
        training,
        held_out,
        {
            "candidates": candidates,
            "memory": memory,
            "seconds": request.seconds,
            "folds": request.folds,
            "groups": groups,
            "seed": request.seed,
        },
    )


def _held_out(request: Request, training: Source) -> Source:
    """The data of --validation, or those beside the training data in an .npz."""
    from errbar.cli.inputs import HELD_OUT, DataRequest, held_out_beside

    data = request.data
    where = request.validation or held_out_beside(data.where)
    if where is None:
        raise ArgumentError(
            f"There are no held-out data beside the training data {data.where}; expected --validation DATA, or an .npz "
            "with x_train, y_train, x_validation and y_validation."
        )
    held_out = DataRequest(where, data.batch_size, data.transform, data.image_size).open(HELD_OUT, training.classes)
    if held_out.rows is not None and not held_out.rows.labelled:
        raise DataError(f"The held-out data {where} have no labels; expected them: the choice is made by these.")
    return held_out


def _groups(here: Session, path: Path, held_out: Source) -> Any:
    import numpy as np

    if not here.team.is_alone:
        raise ArgumentError("--groups does not work with several processes; expected one process, without torchrun.")
    expected = "expected an .npy with one number or text for each held-out sample"
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FileError(f"The groups {path} cannot be read: {error}; {expected}.") from error
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        shape = f"shape {values.shape}" if isinstance(values, np.ndarray) else "several arrays"
        raise FileError(f"The groups {path} have {shape}; {expected}.")
    if held_out.rows is not None and len(values) != len(held_out.rows):
        raise DataError(f"The groups {path} are {len(values)} values for {len(held_out.rows)} samples; {expected}.")
    return values


def candidate_of(text: str) -> dict[str, Any]:
    """The keywords of a candidate.

    >>> candidate_of("last-layers=2,structure=kron")
    {'last_layers': 2, 'structure': 'kron'}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise ArgumentError(
            f"The candidate is {text!r}; expected names and values, for example last-layers=2,structure=kron."
        )
    found: dict[str, Any] = {options.argument_of(name.strip()): value.strip() for name, _, value in pairs}
    for name in _WHOLE:
        if name in found:
            try:
                found[name] = int(found[name])
            except ValueError:
                raise ArgumentError(f"The candidate {text!r} has {name} {found[name]!r}; expected a number.") from None
    return found
