"""`fit`: from a trained model and its training data to a posterior, in one call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._distributed.team import team_of
from errbar._model.batch import Unpack
from errbar._model.network import Output
from errbar._model.positions import IGNORE_INDEX
from errbar._posterior.collect import DEFAULT_EVERY, Request, collected
from errbar._posterior.posterior import Posterior, condition
from errbar._posterior.prior import Prior
from errbar._posterior.width import warn_of_width


def fit(
    model: nn.Module,
    data: Any,
    *,
    prior: Prior | None = None,
    last_layers: int | None = None,
    parameters: str | Sequence[str] | None = None,
    fisher: str = "ggn",
    draws: int = 1,
    seed: int = 0,
    structure: str | Mapping[str, str] = "dense",
    rank: int = DEFAULT_RANK,
    precision: str | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
    outputs: str = "classes",
    class_weights: Any = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = DEFAULT_EVERY,
    group: Any = None,
    progress: bool = False,
    positions: float = 1.0,
    ignore_index: int = IGNORE_INDEX,
) -> Posterior:
    """`condition(collect(model, data, ...), prior)`: from a trained model and its training data to a posterior.

    With a `PosteriorWarning` where it is far too wide to be used before it is calibrated (`_posterior.width`).
    """
    request = Request(
        model=model,
        last_layers=last_layers,
        parameters=parameters,
        fisher=fisher,
        draws=draws,
        seed=seed,
        structure=structure,
        rank=rank,
        precision=precision,
        unpack=unpack,
        output=output,
        outputs=outputs,
        class_weights=class_weights,
        checkpoint=checkpoint,
        every=every,
        positions=positions,
        ignore_index=ignore_index,
    )
    information, first = collected(request, data, group=group, progress=progress)
    posterior = condition(information, Prior() if prior is None else prior)
    warn_of_width(posterior, first, team_of(group))
    return posterior
