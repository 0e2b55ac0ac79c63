"""The Gaussian prior over the parameters, N(0, P_0) with P_0 diagonal, by its precision."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._model.selection import Selection, matching
from errbar.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Prior:
    """λ = 1/variance of each parameter: a number, a mapping module name → number, or one number per parameter.

    >>> Prior(6.0).precision
    6.0
    >>> Prior.from_weight_decay(1e-4, 60_000).precision
    6.0
    """

    precision: float | Mapping[str, float] | Float[Tensor, "n"] = 1.0

    def __post_init__(self) -> None:
        value = self.precision
        if isinstance(value, Tensor):
            if value.ndim != 1 or not bool((torch.isfinite(value) & (value > 0)).all()):
                raise ArgumentError(
                    f"The prior precision is a tensor of shape {tuple(value.shape)} that is not a vector of positive "
                    "finite numbers; expected one for each selected parameter."
                )
            object.__setattr__(self, "precision", value.detach().double().clone())
        elif isinstance(value, Mapping):
            object.__setattr__(self, "precision", {str(k): _positive(v, f" of '{k}'") for k, v in value.items()})
        else:
            object.__setattr__(self, "precision", _positive(value, ""))

    @staticmethod
    def from_weight_decay(weight_decay: float, n_samples: int) -> Prior:
        """λ = N · weight_decay: the prior that L2 regularisation of a *mean* loss over N samples amounts to.

        Right for SGD and Adam with `weight_decay`; AdamW decouples the decay from the gradient and has no such prior.
        """
        return Prior(_positive(weight_decay, " (weight decay)") * _positive(n_samples, " (number of samples)"))

    def described(self) -> str:
        """The precision as text that is the same for the same prior: what ranks compare."""
        value = self.precision
        if isinstance(value, Tensor):
            return f"{len(value)} numbers, SHA-256 {hashlib.sha256(value.cpu().numpy().tobytes()).hexdigest()}"
        return str(dict(sorted(value.items())) if isinstance(value, Mapping) else value)

    def diagonal(self, selection: Selection) -> Float[Tensor, "n"]:
        """λ for each entry of the flat parameter vector, float64 on the CPU."""
        value = self.precision
        if isinstance(value, Tensor):
            if len(value) != selection.n_parameters:
                raise ArgumentError(
                    f"The prior has {len(value)} precisions; expected {selection.n_parameters}, one for each selected "
                    "parameter."
                )
            return value.cpu().clone()
        if isinstance(value, Mapping):
            return self._by_module(value, selection)
        return torch.full((selection.n_parameters,), value, dtype=torch.float64)

    @staticmethod
    def _by_module(value: Mapping[str, float], selection: Selection) -> Float[Tensor, "n"]:
        """The most specific name wins: 'head.bias' over 'head'."""
        diagonal = torch.full((selection.n_parameters,), torch.nan, dtype=torch.float64)
        slices = selection.slices()
        for prefix in sorted(value, key=len):
            names = matching(selection.names, prefix)
            if not names:
                raise ArgumentError(
                    f"The prior names '{prefix}', which no selected parameter lies in; selected are "
                    f"{', '.join(selection.names)}."
                )
            for name in names:
                diagonal[slices[name]] = value[prefix]
        missing = [name for name, where in slices.items() if bool(diagonal[where].isnan().any())]
        if missing:
            raise ArgumentError(
                f"The prior gives no precision for {', '.join(missing)}; expected one for each selected module."
            )
        return diagonal


def _positive(value: object, suffix: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise ArgumentError(f"The prior precision{suffix} is {value!r}; expected a positive finite number.")
    return number
