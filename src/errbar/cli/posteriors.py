"""Posteriors of a command: loaded with their model, made with a prior that was typed, saved, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import errbar
from errbar._model.batch import Batch
from errbar._posterior.width import UNCALIBRATED
from errbar.cli.inputs import DataRequest, Source
from errbar.cli.models import model_of
from errbar.cli.options import DEFAULT_PRIOR
from errbar.cli.output import require_new
from errbar.cli.session import Session
from errbar.errors import ArgumentError, MismatchError

# Inputs by which update and forget tell how much the error bars changed.
COMPARED = 256

# ---------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True, eq=False)
class Loaded:
    """A posterior from a file, and the names of its classes where the file has them."""

    posterior: errbar.Posterior
    classes: tuple[str, ...] | None


@dataclass(frozen=True)
class PosteriorRequest:
    """A posterior as it was typed: its file, the model that it is about, and perhaps the weights of that."""

    path: Path
    model: str
    weights: Path | None = None

    def load(self, device: torch.device) -> Loaded:
        classes = errbar.info(self.path).classes
        try:
            posterior = errbar.load(self.path, model_of(self.model, self.weights, device))
        except MismatchError as error:
            hint = " Give its weights with --weights." if self.weights is None else ""
            sentence = f"{error} The file is {self.path}, the model {self.model}.{hint}"
            raise MismatchError(sentence, arguments=error.arguments) from error
        return Loaded(posterior, classes)


def notice_if_uncalibrated(here: Session, *all_loaded: Loaded) -> None:
    """Say so beside the predictions, once they are made: a mistake before that is told alone."""
    if any(not loaded.posterior.is_calibrated for loaded in all_loaded):
        here.notice(f"{UNCALIBRATED} errbar calibrate fits both to held-out data.")


def posterior_requests(
    paths: Sequence[Path], models: Sequence[str], weights: Sequence[Path]
) -> tuple[PosteriorRequest, ...]:
    """Files with their models and weights, by the order in which they were typed."""
    count = len(paths)
    if len(models) not in (1, count) or len(weights) not in (0, count):
        raise ArgumentError(
            f"There are {count} posteriors, {len(models)} models and {len(weights)} weights; expected one --model for "
            "all or for each, and --weights for each or for none."
        )
    each_model = [models[0]] * count if len(models) == 1 else models
    each_weights: Sequence[Path | None] = weights or [None] * count
    return tuple(PosteriorRequest(*parts) for parts in zip(paths, each_model, each_weights, strict=True))


def opened(
    here: Session, request: PosteriorRequest, data: DataRequest, splits: Sequence[str], output: Path, force: bool
) -> tuple[Loaded, Source]:
    """The posterior and the data, once it is certain that the result can be written."""

    def step() -> tuple[Loaded, Source]:
        if here.team.leads:
            require_new(output, force)
        loaded = request.load(here.device)
        return loaded, data.open(splits, loaded.classes)

    return here.together(step)


# ------------------------------------------------------------------------------------------------------- the prior


def prior_of(text: str, weight_decay: float | None, information: errbar.Information, progress: bool) -> errbar.Prior:
    """The prior: a number, one for each module, the best by "evidence", or what weight decay amounts to."""
    if weight_decay is not None:
        return errbar.Prior.from_weight_decay(weight_decay, int(information.n_samples))
    if text == "evidence":
        return errbar.choose_prior(information, progress=progress)
    return errbar.Prior(_precision(text))


def require_prior(text: str, weight_decay: float | None = None) -> None:
    """Refuse a prior that cannot be meant, before the data are read."""
    if weight_decay is not None:
        if text != DEFAULT_PRIOR:
            raise ArgumentError(f"There are --prior {text} and --weight-decay {weight_decay:g}; expected one of them.")
        errbar.Prior.from_weight_decay(weight_decay, 1)
    if text != "evidence":
        errbar.Prior(_precision(text))


def _precision(text: str) -> Any:
    try:
        if "=" not in text:
            return float(text)
        pairs = [part.rpartition("=") for part in text.split(",")]
        return {name.strip(): float(number) for name, _, number in pairs}
    except ValueError:
        raise ArgumentError(
            f"The prior is {text!r}; expected a number, layer=number,layer=number, or evidence."
        ) from None


# --------------------------------------------------------------------------------------------- saving and comparing


def save(
    here: Session,
    posterior: errbar.Posterior,
    output: Path,
    classes: tuple[str, ...] | None,
    facts: dict[str, Any],
    *,
    factors: bool = False,
) -> None:
    """Write a posterior, and say what it is."""
    here.leading(lambda: posterior.save(output, factors=factors, classes=classes))
    if here.team.leads:
        here.answer({"output": output, **_facts(posterior, classes), **facts, "bytes": output.stat().st_size})


def _facts(posterior: errbar.Posterior, classes: Sequence[str] | None) -> dict[str, Any]:
    information = posterior.information
    precision = posterior.prior.precision
    return {
        "samples": information.n_samples,
        "parameters": information.n_parameters,
        "layers": list(dict.fromkeys(name.rpartition(".")[0] or name for name in information.parameter_names)),
        "structure": information.structure,
        "fisher": information.fisher,
        "prior": "one for each parameter" if isinstance(precision, torch.Tensor) else precision,
        "temperature": posterior.temperature,
        "covariance_scale": posterior.covariance_scale,
        "classes": information.n_classes if classes is None else list(classes),
    }


def variance_change(before: errbar.Posterior, after: errbar.Posterior, inputs: Sequence[Batch]) -> dict[str, float]:
    """The mean variance of the logits' contrasts of some inputs, before and after, and how it changed."""
    first, second = (
        float(torch.cat([posterior.unrounded_logits(batch).contrast_variance for batch in inputs]).mean())
        for posterior in (before, after)
    )
    return {
        "mean_variance_before": first,
        "mean_variance_after": second,
        "mean_variance_change": second / first - 1 if first else 0.0,
    }
