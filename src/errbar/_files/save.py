"""Information and posteriors written to files: what `Information.save` and `Posterior.save` do."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from errbar._base.container import write
from errbar._curvature.structure import Description, Tensors
from errbar._files.choice_table import ChoiceTable
from errbar._files.task import checked_classes, information_record
from errbar._posterior.information import Information
from errbar._posterior.posterior import Posterior


def save_information(information: Information, path: str | os.PathLike[str], classes: Sequence[str] | None) -> None:
    write(path, "information", *information_record(information, checked_classes(classes, information.n_classes)))


def save_posterior(
    posterior: Posterior,
    path: str | os.PathLike[str],
    classes: Sequence[str] | None,
    *,
    factors: bool,
    choice: ChoiceTable | None = None,
) -> None:
    description, tensors = _posterior_record(posterior, classes, factors=factors)
    if choice is not None:
        description["choice"] = choice.described()
    write(path, "posterior", description, tensors)


def save_fusion(
    posteriors: Sequence[Posterior],
    scales: Sequence[float],
    discrepancies: Sequence[float],
    temperature: float,
    covariance_scale: float,
    path: str | os.PathLike[str],
    classes: Sequence[str] | None,
    *,
    factors: bool,
    table: Description | None,
) -> None:
    """Several posteriors and the numbers of their fusion in one file; the arrays of each begin with its number.

    `table` is what `FusionTable.described` says.
    """
    networks: list[Description] = []
    tensors: dict[str, Tensor] = {}
    for c, posterior in enumerate(posteriors):
        own, arrays = _posterior_record(posterior, classes, factors=factors)
        # JSON has no infinity.
        discrepancy = discrepancies[c] if math.isfinite(discrepancies[c]) else None
        networks.append({"scale": scales[c], "discrepancy": discrepancy, "posterior": own})
        tensors |= {f"{c}.{name}": tensor for name, tensor in arrays.items()}
    numbers = {"temperature": temperature, "covariance_scale": covariance_scale}
    compared = {} if table is None else {"table": table}
    write(path, "fusion", {**numbers, "networks": networks, **compared}, tensors)


def _posterior_record(
    posterior: Posterior, classes: Sequence[str] | None, *, factors: bool
) -> tuple[Description, Tensors]:
    """What `container.write` takes."""
    information, precision = posterior.information, posterior.prior.precision
    description, tensors = information_record(information, checked_classes(classes, information.n_classes))
    small: Description | None = None
    if factors:
        small, arrays = posterior.factor.written()
        tensors |= arrays
    if isinstance(precision, Tensor):
        tensors["prior"] = precision
    description |= {
        "prior": {"entries": len(precision)} if isinstance(precision, Tensor) else _as_json(precision),
        "temperature": posterior.temperature,
        "covariance_scale": posterior.covariance_scale,
        "factor": small,
    }
    if posterior.softening > 0:
        # Only then, so that other files are those of before there was a softening.
        description["softening"] = posterior.softening
    if posterior.label_factors is not None:
        pairs = [{"temperature": T, "covariance_scale": scale} for T, scale in posterior.label_factors]
        description["label_factors"] = pairs
    return description, tensors


def _as_json(precision: float | Mapping[str, float]) -> dict[str, Any]:
    return {"modules": dict(precision)} if isinstance(precision, Mapping) else {"value": precision}
