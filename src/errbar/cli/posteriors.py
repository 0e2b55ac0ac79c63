"""Posteriors of a command: loaded with their model, made with a prior that was typed, saved, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import errbar
from errbar._base.memory import readable
from errbar._model.batch import Batch
from errbar._posterior.positions import counted_positions
from errbar._posterior.width import UNCALIBRATED
from errbar.cli.inputs import DataRequest, Source
from errbar.cli.models import model_of
from errbar.cli.options import DEFAULT_PRIOR
from errbar.cli.output import require_new
from errbar.cli.session import Session
from errbar.errors import ArgumentError, FileError, MismatchError

# Inputs by which update and forget tell how much the error bars changed.
COMPARED = 256
# Draws of the logits for that, where there are so many classes that these are quicker.
_DRAWS = 100
# Positions that are enough for it, and inputs of which they are taken at a time: a picture has very many.
_COMPARED_POSITIONS, _FEW_INPUTS = 2**16, 8

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
        description = errbar.info(self.path)
        if isinstance(description, errbar.FusionDescription):
            raise FileError(
                f"{self.path} holds a fused classifier of {len(description.networks)} networks; expected a posterior "
                "of one. errbar predict, evaluate, export and serve take it."
            )
        classes = description.classes
        try:
            posterior = errbar.load(self.path, model_of(self.model, self.weights, device))
        except MismatchError as error:
            hint = " Give its weights with --weights." if self.weights is None else ""
            sentence = f"{error} The file is {self.path}, the model {self.model}.{hint}"
            raise MismatchError(sentence, arguments=error.arguments) from error
        return Loaded(posterior, classes)


@dataclass(frozen=True, eq=False)
class LoadedClassifier:
    """A posterior or a fused classifier from a file, and the names of its classes where the file has them."""

    classifier: errbar.Posterior | errbar.FusedClassifier
    classes: tuple[str, ...] | None

    @property
    def n_classes(self) -> int:
        one = self.classifier
        return one.information.n_classes if isinstance(one, errbar.Posterior) else one.n_classes


@dataclass(frozen=True)
class ClassifierRequest:
    """A file of one network or of several that are fused, with the models as they were typed, and perhaps weights."""

    path: Path
    models: tuple[str, ...]
    weights: tuple[Path, ...] = ()

    def load(self, device: torch.device) -> LoadedClassifier:
        description = errbar.info(self.path)
        count = networks_of(description)
        if len(self.models) not in (1, count) or len(self.weights) not in (0, count):
            what = "is about one network" if count == 1 else f"holds a fused classifier of {count} networks"
            each = (
                "one --model"
                if count == 1
                else f"{count} --model in the order in which they were fused, or one for all"
            )
            raise ArgumentError(
                f"{self.path} {what}, and there are {len(self.models)} models and {len(self.weights)} weights; "
                f"expected {each}, and as many --weights or none."
            )
        models = self.models * count if len(self.models) == 1 else self.models
        weights: Sequence[Path | None] = self.weights or [None] * count
        if count == 1:
            loaded = PosteriorRequest(self.path, models[0], weights[0]).load(device)
            return LoadedClassifier(loaded.posterior, loaded.classes)
        made = [model_of(model, own, device) for model, own in zip(models, weights, strict=True)]
        try:
            fused = errbar.load(self.path, made)
        except MismatchError as error:
            hint = "" if self.weights else " Give the weights of each with --weights."
            raise MismatchError(f"{error} The file is {self.path}.{hint}", arguments=error.arguments) from error
        return LoadedClassifier(fused, description.classes)


def networks_of(description: errbar.FileDescription | errbar.FusionDescription) -> int:
    """How many networks a file is about."""
    return len(description.networks) if isinstance(description, errbar.FusionDescription) else 1


def notice_if_uncalibrated(here: Session, *classifiers: errbar.Posterior | errbar.FusedClassifier) -> None:
    """Say so beside the answer: nothing else shows it."""
    if any(isinstance(one, errbar.Posterior) and not one.is_calibrated for one in classifiers):
        here.notice(f"{UNCALIBRATED} errbar calibrate fits both to held-out data.")


def same_classes(loaded: Sequence[Loaded], paths: Sequence[Path]) -> tuple[str, ...] | None:
    """The names of the classes, where any file has them; those that have must agree."""
    names = {member.classes: path for member, path in zip(loaded, paths, strict=True) if member.classes is not None}
    if len(names) > 1:
        first, second = list(names.values())[:2]
        raise MismatchError(
            f"{first} and {second} name other classes, or in another order; expected the same classes to fuse."
        )
    return next(iter(names), None)


def classifier_requests(
    paths: Sequence[Path], models: Sequence[str], weights: Sequence[Path]
) -> tuple[ClassifierRequest, ...]:
    """Files with the models and weights of their networks, by the order in which they were typed."""
    counts = [networks_of(errbar.info(path)) for path in paths]
    total = sum(counts)
    if total == len(paths):
        requests = posterior_requests(paths, models, weights)
        return tuple(
            ClassifierRequest(one.path, (one.model,), () if one.weights is None else (one.weights,)) for one in requests
        )
    if len(models) not in (1, total) or len(weights) not in (0, total):
        raise ArgumentError(
            f"There are {len(paths)} files of {total} networks together, {len(models)} models and {len(weights)} "
            "weights; expected one --model for all or for each network, and --weights for each or for none."
        )
    requests_made, start = [], 0
    for path, count in zip(paths, counts, strict=True):
        own = slice(start, start + count)
        each = tuple(models) if len(models) == 1 else tuple(models[own])
        requests_made.append(ClassifierRequest(path, each, tuple(weights[own])))
        start += count
    return tuple(requests_made)


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


def save_choice(
    here: Session, choice: errbar.Choice, output: Path, classes: tuple[str, ...] | None, *, factors: bool
) -> None:
    """Write the posterior that autofit chose, and print the table."""
    here.leading(lambda: choice.save(output, factors=factors, classes=classes))
    if here.team.leads:
        size = output.stat().st_size
        table = {
            "reason": choice.reason,
            "chosen": None if choice.chosen is None else asdict(choice.chosen),
            "baselines": [asdict(row) for row in choice.baselines],
            "rows": [asdict(row) for row in choice.rows],
            "not_tried": choice.not_tried,
        }
        facts = {"output": output, **_facts(choice.posterior, classes), **table, "bytes": size}
        here.answer(facts, f"{choice}\nSaved: {output}, {readable(size)}")


def _facts(posterior: errbar.Posterior, classes: Sequence[str] | None) -> dict[str, Any]:
    information = posterior.information
    precision = posterior.prior.precision
    return {
        "samples": information.n_samples,
        "parameters": information.n_parameters,
        "layers": list(dict.fromkeys(name.rpartition(".")[0] or name for name in information.parameter_names)),
        "structure": information.structure,
        "fisher": information.fisher,
        **({} if information.outputs == "classes" else {"outputs": information.outputs}),
        "prior": "one for each parameter" if isinstance(precision, torch.Tensor) else precision,
        "temperature": posterior.temperature,
        "covariance_scale": posterior.covariance_scale,
        "softening": posterior.softening,
        **({} if posterior.label_factors is None else _of_each_label(posterior)),
        "classes": information.n_classes if classes is None else list(classes),
    }


def _of_each_label(posterior: errbar.Posterior) -> dict[str, Any]:
    return {
        "label_temperatures": posterior.label_temperatures,
        "label_covariance_scales": posterior.label_covariance_scales,
    }


def variance_change(before: errbar.Posterior, after: errbar.Posterior, inputs: Sequence[Batch]) -> dict[str, float]:
    """The mean variance of the logits' contrasts of some inputs, before and after, and how it changed."""
    variances_of = _of_positions if before.information.outputs == "positions" else _of_inputs
    first, second = (float(torch.cat(variances_of(posterior, inputs)).mean()) for posterior in (before, after))
    return {
        "mean_variance_before": first,
        "mean_variance_after": second,
        "mean_variance_change": second / first - 1 if first else 0.0,
    }


def _of_inputs(posterior: errbar.Posterior, inputs: Sequence[Batch]) -> list[Tensor]:
    return [posterior.sampling_logits(batch, _DRAWS).contrast_variance for batch in inputs]


def _of_positions(posterior: errbar.Posterior, inputs: Sequence[Batch]) -> list[Tensor]:
    """Those of the positions that count, of as many inputs as have enough of them."""
    found: list[Tensor] = []
    for batch in chain.from_iterable(batch.parts(_FEW_INPUTS) for batch in inputs):
        variance = posterior.position_logits(batch, _DRAWS).contrast_variance
        counted, _, _ = counted_positions(posterior.information.task, batch, tuple(variance.shape))
        found.append(variance[counted.to(variance.device)])
        if sum(map(len, found)) >= _COMPARED_POSITIONS:
            break
    return found
