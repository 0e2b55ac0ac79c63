"""`errbar plan`: what a fit would cost."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import errbar
from errbar.cli import options
from errbar.errors import ArgumentError, DataError

if TYPE_CHECKING:
    from errbar._model.batch import Batch

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "t": 10**12}


def plan(
    model: options.ModelArgument,
    data: options.DataArgument,
    weights: options.Weights = None,
    memory: options.Memory = None,
    last_layers: Annotated[
        int | None, typer.Option("--last-layers", min=1, help="Plan for this many layers that run last, and no others.")
    ] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameters", metavar="NAME", help="Plan for these alone, named as for errbar fit. Repeatable."),
    ] = None,
    fisher: options.Fisher = "ggn",
    draws: options.LabelDraws = 1,
    structure: options.Structure = "auto",
    rank: options.Rank = 100,
    precision: options.Precision = "model",
    samples: options.Samples = 1000,
    transform: options.Transform = None,
    image_size: options.ImageSize = None,
    batch_size: options.BatchSize = 256,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Estimate what a fit of the last layers, of all vectors and of all parameters would cost, by the first batch."""
    from errbar._model.batch import batches
    from errbar.cli.inputs import TRAINING, DataRequest
    from errbar.cli.models import model_of
    from errbar.cli.session import session

    with session("plan", as_json=as_json, device=device) as here:
        limit = None if memory is None else byte_count(memory)
        source = DataRequest(data, batch_size, transform, image_size).open(TRAINING)
        network = model_of(model, weights, here.device)
        example = next(batches(source.loader()), None)
        if example is None:
            raise DataError(f"The data {data} are empty: expected at least one batch.")
        costs = errbar.plan(
            network,
            example,
            limit,
            last_layers=last_layers,
            parameters=parameters[0] if parameters is not None and len(parameters) == 1 else parameters,
            structure=None if structure == "auto" else structure,
            fisher=fisher,
            draws=draws,
            rank=rank,
            precision=options.precision_of(precision),
            samples=samples,
            unpack=_as_call,
        )
        best = None if costs.best is None else asdict(costs.best)
        here.answer({**asdict(costs), "best": best}, str(costs))


def _as_call(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return batch.args, batch.kwargs, batch.labels


def byte_count(text: str) -> int:
    """Bytes of a number with a unit.

    >>> byte_count("8GiB"), byte_count("500 MB"), byte_count("1024")
    (8589934592, 500000000, 1024)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ArgumentError(f"The memory is {text!r}; expected bytes, for example 8GiB or 500MB.")
    return int(float(match[1]) * _UNITS[match[2] or ""])
