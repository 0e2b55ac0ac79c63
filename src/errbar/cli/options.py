"""What can be typed after a command. An option means the same, and is described once, wherever it occurs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from errbar.errors import ArgumentError

_CALLABLE = "PACKAGE.MODULE:CALLABLE"
_DATA = "An .npz or .parquet file, a folder of pictures, or package.module:callable; file.npz:test for x_test, y_test."

DEFAULT_PRIOR = "1.0"

# Options with few values; another value is a usage error, whose message lists these.
FisherName = Literal["ggn", "eta", "sampled"]
OutputsName = Literal["classes", "labels", "positions"]
PrecisionName = Literal["model", "float64"]
ObjectiveName = Literal["nll", "brier", "ece"]
ScaleName = Literal["temperature", "covariance-scale"]
SuspicionName = Literal["label-suspicion", "mutual-information", "contrast-variance"]
AcquisitionName = Literal["information", "mutual-information", "entropy", "margin", "random"]
DrawsName = Literal["random", "antithetic", "sobol"]


class OutputName(StrEnum):
    """What an exported graph returns; an enumeration, because typer takes no list of `Literal`."""

    PMF = "pmf"
    STD = "std"
    COVARIANCE = "covariance"
    LOGITS = "logits"
    LOGIT_COVARIANCE = "logit-covariance"
    RISK = "risk"
    LOWER = "lower"
    UPPER = "upper"
    MUTUAL_INFORMATION = "mutual-information"


def _structure_typed(text: str) -> str:
    """A structure, or one for each layer, in the text that the library has for it."""
    from errbar._curvature.registry import require_structure

    try:
        return require_structure(text)
    except ArgumentError as error:
        raise typer.BadParameter(str(error)) from error


ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="package.module:callable that returns the model, also in this folder.")
]
DataArgument = Annotated[str, typer.Argument(metavar="DATA", help=_DATA)]
PosteriorArgument = Annotated[
    Path, typer.Argument(metavar="POSTERIOR", help="A file of errbar fit, calibrate, update, forget or merge.")
]

ClassifierArgument = Annotated[
    Path,
    typer.Argument(
        metavar="POSTERIOR", help="A file of errbar fit, calibrate, update, forget, merge or calibrate-fusion."
    ),
]
Posteriors = Annotated[
    list[Path], typer.Option("--posterior", "-p", metavar="FILE", help="A classifier; repeat it for each.")
]

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A file that errbar has written.")]

Model = Annotated[str, typer.Option("--model", metavar=_CALLABLE, help="Returns the model of the fit.")]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="FILE", help="Its weights: .safetensors, or a state dict as .pt, .pth or .th."),
]
NetworkModels = Annotated[
    list[str],
    typer.Option(
        "--model", metavar=_CALLABLE, help="Returns the model of the fit; one for each network that is fused."
    ),
]
NetworkWeights = Annotated[
    list[Path] | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Its weights: .safetensors, or a state dict as .pt, .pth or .th; one for each network that is fused.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", metavar=_CALLABLE, help="Its model; one for each posterior, or one for all."),
]
WeightsFiles = Annotated[
    list[Path] | None, typer.Option("--weights", metavar="FILE", help="Its weights; one for each posterior.")
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")]
Results = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write: .jsonl, .csv, .parquet or .npz.")
]
Graph = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write: .onnx or .pt2.")]
Factors = Annotated[bool, typer.Option("--factors", help="Save the factorisation too, so that the file loads at once.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Inputs per batch, for files and data sets.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1; auto is a GPU where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
Progress = Annotated[bool, typer.Option("--progress/--no-progress", help="Show progress and the time left.")]
Transform = Annotated[
    str | None,
    typer.Option("--transform", metavar=_CALLABLE, help="From one sample (a picture, or a row) to its tensor."),
]
ImageSize = Annotated[
    str | None, typer.Option("--image-size", metavar="SIZE", help="Resize pictures: 32, or 32x48 for height x width.")
]
ClassNames = Annotated[
    str | None, typer.Option("--class-names", metavar="NAMES", help="cat,dog,… or a file with one name on each line.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="Monte Carlo draws per input.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the draws.")]
Validation = Annotated[
    str | None,
    typer.Option("--validation", metavar="DATA", help="Held-out data with labels; x_validation of an .npz without it."),
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BYTES", help="Memory that a fit may take, for example 8GiB.")
]
Seconds = Annotated[
    float | None, typer.Option("--seconds", help="Stop choosing after this time, with the best so far.")
]
Fisher = Annotated[
    FisherName,
    typer.Option("--fisher", help="ggn; eta, diagonal as in the paper; or sampled, ggn by drawn labels."),
]
Outputs = Annotated[
    OutputsName,
    typer.Option(
        "--outputs", help="What the model returns: logits of classes, of labels that are each true, or of positions."
    ),
]
IgnoreIndex = Annotated[
    int | None,
    typer.Option(
        "--ignore-index", metavar="LABEL", help="The label of positions without one, for positions; -100 without it."
    ),
]
LabelDraws = Annotated[int, typer.Option("--draws", min=1, help="Labels drawn per sample, for sampled.")]
Structure = Annotated[
    str,
    typer.Option(
        "--structure",
        metavar="STRUCTURE",
        callback=_structure_typed,
        help="Structure of the covariance: dense, block, kron, lowrank, diag; auto, the most exact that fits; or one "
        "for each layer, fc=kron,*=block.",
    ),
]
Rank = Annotated[int, typer.Option("--rank", min=1, help="Rank of the sketch, for lowrank.")]
Precision = Annotated[
    PrecisionName, typer.Option("--precision", help="Precision of products: the model's own, or float64.")
]
PriorText = Annotated[
    str,
    typer.Option(
        "--prior", metavar="PRIOR", help="Its precision: a number, layer=number,… for each layer, or evidence."
    ),
]
Risk = Annotated[
    list[str] | None,
    typer.Option(
        "--risk",
        metavar="γ",
        help="A column with the probability that a class is more probable than this; one number, or one for each "
        "class with commas. Can be repeated.",
    ),
]
Covariance = Annotated[bool, typer.Option("--covariance", help="Write the covariance of the PMF too.")]


def argument_of(choice: str) -> str:
    """What the library calls a value that is typed.

    >>> argument_of("label-suspicion")
    'label_suspicion'
    """
    return choice.replace("-", "_")


def precision_of(choice: PrecisionName) -> Literal["float64"] | None:
    """The precision of products for the library: None is the model's own."""
    return "float64" if choice == "float64" else None
