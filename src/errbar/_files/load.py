"""Posteriors and information from files: `load`, `merge`, `info` and `verify`. Saving is a method of the values.

A file is compared with the model by fingerprint (SHA-256 of all weights), parameters, layers and classes. The code of
the model is not compared: files know weights and modules, not what happens between them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import nn

from errbar._base.container import Contents, read
from errbar._base.json_fields import Fields
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import Factor
from errbar._distributions.calibration import Calibration
from errbar._files.choice_table import ChoiceTable, read_choice_table
from errbar._files.task import checked_classes, read_information, read_task
from errbar._model.batch import Unpack
from errbar._model.network import Network, Output, described_output
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior, condition, jitter_limit
from errbar._posterior.prior import Prior
from errbar.errors import ArgumentError, DamagedFileError, FileError, MismatchError

Path = str | os.PathLike[str]
KINDS = ("posterior", "information", "checkpoint")


@dataclass(frozen=True, eq=False)
class FileDescription:
    """What a file says about itself: `errbar.info` reads it, `errbar.verify` reads and checks everything.

    `precision` is the prior's, None for files without one; `batches` counts those in a checkpoint. `output` says where
    the logits are in what the model returns, None if that is only the logits; `unpack` whether the fit had one. `choice`
    is the table of `autofit`, None for a posterior that it did not choose.
    """

    path: str
    kind: str
    bytes: int
    format: int
    errbar_version: str
    torch_version: str
    content: str
    weights: str
    structure: str
    fisher: str
    dtype: str
    parameters: Mapping[str, tuple[int, ...]]
    n_parameters: int
    n_classes: int
    classes: tuple[str, ...] | None
    n_samples: float
    log_likelihood: float | None
    precision: float | Mapping[str, float] | str | None
    temperature: float | None
    covariance_scale: float | None
    softening: float | None
    has_factors: bool
    batches: int | None
    output: str | None
    unpack: bool
    choice: ChoiceTable | None


def load(
    path: Path,
    model: nn.Module,
    *,
    classes: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
) -> Posterior:
    """The posterior that `Posterior.save` wrote, on the device of `model`, which must have the weights of the fit.

    `classes`, where given, must be the names that were saved. With the factors in the file the loaded posterior
    predicts what the saved one did to the last bit; without them they are computed again.

    `unpack` and `output` are those of the fit. A file holds no functions: an `output` that was one must be given again;
    a position or a key is in the file. Without `unpack`, batches are read as if the fit had had none.
    """
    contents = _read(path)
    if contents.kind != "posterior":
        raise FileError(
            f"{contents.path} holds {_noun(contents.kind)}, not a posterior. Use errbar.merge([path]) and "
            "errbar.condition(information, prior, model=model)."
        )
    return _posterior(contents, model, classes, unpack, output)


def merge(paths: Iterable[Path]) -> Information:
    """The information of several files about the same weights, added up in the order given; priors are ignored.

    Files of posteriors and of information can be mixed. The result has no model: give one with
    `condition(information, prior, model=model)` or `information.with_model(model)`.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise ArgumentError(f"paths is {os.fspath(paths)!r}; expected a list of paths, for example [path].")
    parts: list[Information] = []
    digests: dict[str, str] = {}
    names: tuple[str, ...] | None = None
    for path in paths:
        contents = _read(path)
        if contents.kind == "checkpoint":
            raise FileError(
                f"{contents.path} is the checkpoint of a fit that may not be complete. Let errbar.collect finish, and "
                "merge what Information.save writes."
            )
        digest = _digest_of_sums(contents)
        if digest is None:
            digest = os.path.realpath(contents.path)
        if digest in digests:
            raise MismatchError(
                f"{contents.path} and {digests[digest]} hold the same information, whose data would count twice. "
                "Expected files of different data."
            )
        digests[digest] = contents.path
        information, classes = read_information(contents)
        if names is not None and classes is not None and names != classes:
            raise MismatchError(f"{contents.path} names other classes than the files before it: these must match.")
        names = names or classes
        if parts:
            parts[0].task.require_same_kind(information.task)
        parts.append(information)
    if not parts:
        raise ArgumentError("paths is empty; expected at least one file.")
    return reduce(add, parts)


def info(path: Path) -> FileDescription:
    """What a file says about itself. Only its header is read; `verify` checks the rest."""
    return _description(_read(path, header_only=True))


def verify(path: Path, model: nn.Module | None = None) -> FileDescription:
    """Read and check all of a file, and with `model` that it belongs to these weights; raises an error otherwise."""
    contents = _read(path)
    description = _description(contents)
    information, _ = read_information(contents)
    if contents.kind == "posterior":
        _factor(contents, information, _prior(contents, information))
    if model is not None:
        information.about(Network(model))
    return description


def _read(path: Path, *, header_only: bool = False) -> Contents:
    contents = read(path, header_only=header_only)
    if contents.kind == "track":
        raise FileError(f"{contents.path} holds a track. Use errbar.Track.load(path, posterior).")
    if contents.kind not in KINDS:
        raise FileError(f"{contents.path} holds {contents.kind[:60]!a}; expected one of {', '.join(KINDS)}.")
    return contents


def _digest_of_sums(contents: Contents) -> str | None:
    """The same for all files of the same sums, whatever their prior, temperature or factors.

    None if all sums are zero: a network that is certain of everything gives no information, whatever the data.
    """
    sums = [tensor for name, tensor in contents.tensors.items() if name.split(".")[0] == "sum"]
    if not any(bool(tensor.count_nonzero()) for tensor in sums):
        return None
    digest = hashlib.sha256()
    for tensor in sums:
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _posterior(
    contents: Contents, model: nn.Module, classes: Sequence[str] | None, unpack: Unpack | None, output: Output
) -> Posterior:
    information, names = read_information(contents)
    expected_names = checked_classes(classes, information.n_classes)
    if expected_names is not None and expected_names != names:
        description = "without names of classes" if names is None else f"with the classes {', '.join(names[:5])}"
        raise MismatchError(
            f"{contents.path} was saved {description}; expected {', '.join(expected_names[:5])}, in this order."
        )
    prior, fields = _prior(contents, information), contents.description
    calibration = Calibration(_temperature(fields), fields.number("covariance_scale", least=0), _softening(fields))
    bound = information.with_model(model, unpack=unpack, output=output)
    factor = _factor(contents, information, prior)
    if factor is None:
        return replace(condition(bound, prior), **vars(calibration))
    return Posterior(bound, prior, factor.to(bound.network.device), **vars(calibration))


def _factor(contents: Contents, information: Information, prior: Prior) -> Factor | None:
    if "factor" not in contents.description:
        return None
    diagonal = prior.diagonal(information.selection)
    structure = structure_called(information.structure)
    return structure.read_factor(contents, information.total, diagonal, jitter_limit(information.dtype))


def _prior(contents: Contents, information: Information) -> Prior:
    precision = _precision(contents.description)
    if precision is None:
        raise DamagedFileError(f"{contents.path} holds a posterior without a prior.")
    try:
        if isinstance(precision, str):
            prior = Prior(contents.tensor("prior", information.n_parameters))
        else:
            prior = Prior(precision)
        prior.diagonal(information.selection)
    except ArgumentError as error:
        raise DamagedFileError(f"{contents.path} holds an invalid prior: {error}") from error
    return prior


def _precision(fields: Fields) -> float | dict[str, float] | str | None:
    """The prior as it was given: a number, one for each module, or "one for each parameter" for an array."""
    if "prior" not in fields:
        return None
    prior = fields.part("prior")
    if "modules" in prior:
        modules = prior.part("modules")
        return {name: float(modules.number(name, above=0)) for name in modules.names()}
    if "entries" in prior:
        return "one for each parameter"
    return float(prior.number("value", above=0))


def _description(contents: Contents) -> FileDescription:
    fields = contents.description
    task = read_task(fields)
    return FileDescription(
        path=contents.path,
        kind=contents.kind,
        bytes=contents.size,
        format=contents.versions[0],
        errbar_version=contents.versions[1],
        torch_version=contents.versions[2],
        content=contents.digest,
        weights=task.network.fingerprint,
        structure=task.structure,
        fisher=task.fisher,
        dtype=str(task.dtype).removeprefix("torch."),
        parameters=dict(zip(task.selection.names, task.selection.shapes, strict=True)),
        n_parameters=task.selection.n_parameters,
        n_classes=task.n_classes,
        classes=fields.texts("classes") if "classes" in fields else None,
        n_samples=fields.number("n_samples", least=0),
        log_likelihood=fields.number("log_likelihood") if "log_likelihood" in fields else None,
        precision=_precision(fields),
        temperature=_temperature(fields) if "temperature" in fields else None,
        covariance_scale=fields.number("covariance_scale", least=0) if "covariance_scale" in fields else None,
        softening=_softening(fields) if contents.kind == "posterior" else None,
        has_factors="factor" in fields,
        batches=fields.part("position").whole("batches", 1) if "position" in fields else None,
        output=None if task.network.output is None else described_output(task.network.output),
        unpack=task.batch_form is not None,
        choice=read_choice_table(fields),
    )


def _temperature(fields: Fields) -> float:
    """T, whose square must be finite and positive too."""
    return fields.number("temperature", least=1e-100, most=1e100)


def _softening(fields: Fields) -> float:
    """c, which files of before there was one, and files of posteriors without one, do not have."""
    return fields.number("softening", least=0) if "softening" in fields else 0.0


def _noun(kind: str) -> str:
    return "a checkpoint" if kind == "checkpoint" else kind
