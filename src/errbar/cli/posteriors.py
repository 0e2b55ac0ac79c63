"""Posteriors of a command: loaded with their model, made with a prior that was typed, saved with names of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import errbar
from errbar.cli.models import model_of
from errbar.cli.options import DEFAULT_PRIOR
from errbar.errors import ArgumentError, MismatchError


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
        described = errbar.info(self.path)
        try:
            loaded = errbar.load(self.path, model_of(self.model, self.weights, device))
        except MismatchError as error:
            hint = " Give its weights with --weights." if self.weights is None else ""
            raise MismatchError(f"{error} The file is {self.path}, the model {self.model}.{hint}") from error
        return Loaded(loaded, described.classes)


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


def described(posterior: errbar.Posterior, classes: Sequence[str] | None) -> dict[str, Any]:
    """What there is to say about a posterior."""
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
