"""Posteriors and information from files: `load`, `merge`, `info` and `verify`. Saving is a method of the values.

A file is compared with the model by fingerprint (SHA-256 of all weights), parameters, layers and classes. The code of
the model is not compared: files know weights and modules, not what happens between them.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, cast, overload

import torch
from torch import nn

from errbar._base.container import Contents, read
from errbar._base.json_fields import Fields
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import Factor
from errbar._curvature.task import Task
from errbar._distributions.calibration import Calibration, LabelFactors
from errbar._files.choice_table import ChoiceTable, read_choice_table
from errbar._files.task import checked_classes, read_information, read_task
from errbar._model.batch import Unpack
from errbar._model.network import Network, Output, described_output
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior, condition, jitter_limit
from errbar._posterior.prior import Prior
from errbar.errors import ArgumentError, DamagedFileError, FileError, MismatchError

if TYPE_CHECKING:
    from errbar._fusion.fused import FusedClassifier
    from errbar._fusion.table import FusionTable

Path = str | os.PathLike[str]
KINDS = ("posterior", "information", "checkpoint", "fusion")
# More networks than anybody fuses, and few enough to refuse a damaged file at once.
_MOST_NETWORKS = 10_000


@dataclass(frozen=True, eq=False)
class FileDescription:
    """What a file says about itself: `errbar.info` reads it, `errbar.verify` reads and checks everything.

    `precision` is the prior's, None for files without one; `batches` counts those in a checkpoint. `output` says where
    the logits are in what the model returns, None if that is only the logits; `unpack` whether the fit had one.
    `label_temperatures` and `label_covariance_scales` are T and T_c of each of several labels, None where all have the
    same. `ignore_index` is the label of positions without one, None for other outputs. `choice` is the table of
    `autofit`, None for a posterior that it did not choose.
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
    outputs: str
    ignore_index: int | None
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
    label_temperatures: tuple[float, ...] | None
    label_covariance_scales: tuple[float, ...] | None
    has_factors: bool
    batches: int | None
    output: str | None
    unpack: bool
    choice: ChoiceTable | None


@dataclass(frozen=True, eq=False)
class FusionDescription:
    """What the file of a fused classifier says about itself, as `FileDescription` does for those of one network.

    `networks` describes the posterior of each; `scales` are a, `discrepancies` s, `temperature` T and
    `covariance_scale` q. `choice` is what `calibrate_fusion` compared, None for a fusion that was made by hand.
    """

    path: str
    kind: str
    bytes: int
    format: int
    errbar_version: str
    torch_version: str
    content: str
    n_classes: int
    classes: tuple[str, ...] | None
    scales: tuple[float, ...]
    discrepancies: tuple[float, ...]
    temperature: float
    covariance_scale: float
    networks: tuple[FileDescription, ...]
    choice: ChoiceTable | None


@overload
def load(
    path: Path,
    model: nn.Module,
    *,
    classes: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
) -> Posterior: ...


@overload
def load(
    path: Path,
    model: Sequence[nn.Module],
    *,
    classes: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
) -> FusedClassifier: ...


def load(
    path: Path,
    model: nn.Module | Sequence[nn.Module],
    *,
    classes: Sequence[str] | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
) -> Posterior | FusedClassifier:
    """The posterior that `Posterior.save` wrote, on the device of `model`, which must have the weights of the fit.

    With a list of models, in the order in which they were fused, what `FusedClassifier.save` wrote.

    `classes`, where given, must be the names that were saved. With the factors in the file the loaded posterior
    predicts what the saved one did to the last bit; without them they are computed again.

    `unpack` and `output` are those of the fit. A file holds no functions: an `output` that was one must be given again;
    a position or a key is in the file. Without `unpack`, batches are read as if the fit had had none.
    """
    contents = _read(path)
    if contents.kind == "fusion" or isinstance(model, (list, tuple)):
        return _fusion(contents, model, classes, unpack, output)
    if contents.kind != "posterior":
        raise FileError(
            f"{contents.path} holds {_noun(contents.kind)}, not a posterior. Use errbar.merge([path]) and "
            "errbar.condition(information, prior, model=model)."
        )
    return _posterior(contents, cast("nn.Module", model), classes, unpack, output)


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
        _require_one_network(contents)
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


def info(path: Path) -> FileDescription | FusionDescription:
    """What a file says about itself. Only its header is read; `verify` checks the rest."""
    return _described(_read(path, header_only=True))


def verify(path: Path, model: nn.Module | Sequence[nn.Module] | None = None) -> FileDescription | FusionDescription:
    """Read and check all of a file, and with `model` that it belongs to these weights; raises an error otherwise.

    For the file of a fused classifier `model` is a list with that of each network.
    """
    contents = _read(path)
    description = _described(contents)
    members: list[Contents] = [contents]
    models: list[Any] = [model]
    if contents.kind == "fusion":
        members = _members(contents)
        models = [None] * len(members) if model is None else _models(contents, model, len(members))
    elif isinstance(model, (list, tuple)):
        raise _one_network(contents, model)
    for member, own in zip(members, models, strict=True):
        information, _ = read_information(member)
        if member.kind == "posterior":
            _factor(member, information, _prior(member, information))
        if own is not None:
            information.about(Network(own, kind=information.network.kind))
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
        posterior = replace(condition(bound, prior), **vars(calibration))
    else:
        posterior = Posterior(bound, prior, factor.to(bound.network.device), **vars(calibration))
    return posterior.with_label_factors(_label_factors(fields, information.task))


def _require_one_network(contents: Contents) -> None:
    if contents.kind == "fusion":
        raise FileError(
            f"{contents.path} holds a fused classifier of several networks; expected a file of one. Use "
            "errbar.load(path, [model, ...]), whose posteriors can be saved one by one."
        )


def _fusion(
    contents: Contents,
    models: nn.Module | Sequence[nn.Module],
    classes: Sequence[str] | None,
    unpack: Unpack | None,
    output: Output,
) -> FusedClassifier:
    from errbar._fusion.fused import FusedClassifier

    if contents.kind != "fusion":
        raise _one_network(contents, models)
    members = _members(contents)
    each = _models(contents, models, len(members))
    posteriors = [
        _posterior(member, model, classes, unpack, output) for member, model in zip(members, each, strict=True)
    ]
    if len({posterior.information.n_classes for posterior in posteriors}) > 1:
        raise DamagedFileError(f"{contents.path} holds a fusion of networks with different classes.")
    return FusedClassifier(
        tuple(posteriors), **_numbers(contents.description), table=_fusion_table(contents.description, len(posteriors))
    )


def _one_network(contents: Contents, models: object) -> FileError:
    return FileError(
        f"{contents.path} holds {_noun(contents.kind)} of one network, and model is a {type(models).__name__}; "
        "expected one model."
    )


def _members(contents: Contents) -> list[Contents]:
    """The posterior of each network, as if it had a file of its own."""
    networks = contents.description.parts("networks")
    if not 2 <= len(networks) <= _MOST_NETWORKS:
        raise DamagedFileError(f"{contents.path} holds a fusion of {len(networks)} networks; expected two or more.")
    members = []
    for c, part in enumerate(networks):
        own = {name.partition(".")[2]: t for name, t in contents.tensors.items() if name.partition(".")[0] == str(c)}
        members.append(replace(contents, kind="posterior", description=part.part("posterior"), tensors=own))
    return members


def _models(contents: Contents, models: object, count: int) -> list[nn.Module]:
    if not isinstance(models, (list, tuple)) or len(models) != count:
        given = f"{len(models)} models" if isinstance(models, (list, tuple)) else f"a {type(models).__name__}"
        raise MismatchError(
            f"{contents.path} holds a fused classifier of {count} networks, and model is {given}; expected a "
            "list of their models, in the order in which they were fused."
        )
    return list(models)


def _numbers(fields: Fields) -> dict[str, Any]:
    """a, s, T and q."""
    networks = fields.parts("networks")
    return {
        "scales": tuple(part.number("scale", above=0) for part in networks),
        "discrepancies": tuple(
            part.number("discrepancy", least=0) if "discrepancy" in part else math.inf for part in networks
        ),
        "temperature": _temperature(fields),
        "covariance_scale": _fused_scale(fields, networks),
    }


def _fusion_table(fields: Fields, count: int) -> FusionTable | None:
    """What `calibrate_fusion` compared; None for fusions made by hand, and in files of before it was kept."""
    from errbar._fusion.table import FusionRow, FusionTable

    if "table" not in fields:
        return None
    part = fields.part("table")
    rows = tuple(
        FusionRow(
            row.text("name"),
            row.whole("fitted"),
            *(row.number(name) for name in ("nll", "difference", "standard_error")),
        )
        for row in part.parts("rows")
    )
    networks = part.parts("networks")
    if len(networks) != count or part.text("chosen") not in {row.name for row in rows}:
        raise DamagedFileError(f"{fields.where} holds a comparison that is not one of its {count} networks.")
    return FusionTable(
        rows,
        part.text("chosen"),
        part.text("reason"),
        weights=tuple(own.number("weight") for own in networks),
        gains=tuple(own.number("gain") for own in networks),
        inputs=part.whole("inputs", 1),
        folds=part.whole("folds", 1),
    )


def _fused_scale(fields: Fields, networks: Sequence[Fields]) -> float:
    """q, which is zero where all discrepancies are infinite."""
    q = fields.number("covariance_scale", least=0)
    if q > 0 and not any("discrepancy" in part for part in networks):
        raise DamagedFileError(f"{fields.where} says covariance_scale = {q:g} with no finite discrepancy; expected 0.")
    return q


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


def _of_file(contents: Contents) -> dict[str, Any]:
    """What is said of a file whatever it holds."""
    return {
        "path": contents.path,
        "kind": contents.kind,
        "bytes": contents.size,
        "format": contents.versions[0],
        "errbar_version": contents.versions[1],
        "torch_version": contents.versions[2],
        "content": contents.digest,
    }


def _described(contents: Contents) -> FileDescription | FusionDescription:
    if contents.kind != "fusion":
        return _description(contents)
    networks = tuple(_description(member) for member in _members(contents))
    table = _fusion_table(contents.description, len(networks))
    return FusionDescription(
        **_of_file(contents),
        n_classes=networks[0].n_classes,
        classes=networks[0].classes,
        **_numbers(contents.description),
        networks=networks,
        choice=None if table is None else ChoiceTable.of(table.cells(), table.reason, ()),
    )


def _description(contents: Contents) -> FileDescription:
    fields = contents.description
    task = read_task(fields)
    temperatures, scales = _of_each_label(fields, task) if contents.kind == "posterior" else (None, None)
    return FileDescription(
        **_of_file(contents),
        weights=task.network.fingerprint,
        structure=task.structure,
        fisher=task.fisher,
        outputs=task.outputs,
        ignore_index=None if task.positions is None else task.positions.ignore_index,
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
        label_temperatures=temperatures,
        label_covariance_scales=scales,
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


def _label_factors(fields: Fields, task: Task) -> LabelFactors | None:
    """What T and T_c of each label are times those of all; most posteriors have none."""
    if "label_factors" not in fields:
        return None
    parts = fields.parts("label_factors")
    if task.kind.has_gauge or len(parts) != task.n_classes:
        raise DamagedFileError(f"{fields.where} has factors of {len(parts)} labels; expected one for each of its own.")
    return tuple((_temperature(part), part.number("covariance_scale", least=0)) for part in parts)


def _of_each_label(fields: Fields, task: Task) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """T and T_c of each label of a posterior, None where all have those of the posterior."""
    factors = _label_factors(fields, task)
    if factors is None:
        return None, None
    T, scale = _temperature(fields), fields.number("covariance_scale", least=0)
    return tuple(T * factor for factor, _ in factors), tuple(scale * factor for _, factor in factors)


def _noun(kind: str) -> str:
    return "a checkpoint" if kind == "checkpoint" else kind
