"""`collect`: one pass over the data gives their `Information` about the parameters, which adds up.

Information of batches, ranks, sites and days is the same `+`; forgetting is `−`; discounting is `* 0.9`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._progress import track
from errbar.data import Batch, Unpack, batches, checked_labels, count_batches
from errbar.dense import DenseSum, require_dense_memory
from errbar.errors import ArgumentError, DataError, ForgetError, MismatchError
from errbar.fisher import Fisher, fisher_root, require_fisher
from errbar.jacobian import chunks, jacobians
from errbar.layers import Selection, require_one_question, select
from errbar.network import Network, plain_execution, require_finite_logits

Structure = Literal["dense"]
Precision = Literal["float64"]


@dataclass(frozen=True, eq=False)
class Information:
    """What the data said about the parameters, without a prior: Σ_n J_nᵀ Λ_n J_n and how many samples it sums.

    `log_likelihood` is Σ ln f_y(x; θ̂) where the data had labels, and None where they had not.
    """

    network: Network
    selection: Selection
    total: DenseSum
    fisher: Fisher
    n_samples: float
    n_classes: int
    log_likelihood: float | None
    precision: Precision | None = None
    structure: Structure = "dense"

    @property
    def model(self) -> nn.Module:
        """The model as the user gave it."""
        return self.network.model

    @property
    def n_parameters(self) -> int:
        return self.selection.n_parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.selection.names

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return torch.float64 if self.precision == "float64" else self.network.dtype

    def dense(self) -> Float[Tensor, "n n"]:
        """The information matrix, float64."""
        return self.total.matrix.clone()

    def __add__(self, other: Information) -> Information:
        self._require_same_kind(other)
        return replace(
            self,
            total=self.total + other.total,
            n_samples=self.n_samples + other.n_samples,
            log_likelihood=_combined(self.log_likelihood, other.log_likelihood, 1),
        )

    def __sub__(self, other: Information) -> Information:
        """Forget: refuses more samples than were seen, and what leaves less than no information."""
        self._require_same_kind(other)
        if other.n_samples > self.n_samples * (1 + 1e-12):
            raise ForgetError(
                f"Cannot forget {other.n_samples:g} samples: the information is of {self.n_samples:g} only."
            )
        total = self.total - other.total
        if not total.is_possible(self.dtype):
            raise ForgetError(
                "Forgetting these data would leave negative information, so they were not among the data seen. "
                "Expected data that were part of the fit, unchanged."
            )
        return replace(
            self,
            total=total,
            n_samples=self.n_samples - other.n_samples,
            log_likelihood=_combined(self.log_likelihood, other.log_likelihood, -1),
        )

    def __mul__(self, factor: float) -> Information:
        """Discount: data that count for `factor` of what they did."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)):
            return NotImplemented
        if not (math.isfinite(factor) and factor >= 0):
            raise ArgumentError(f"The discount is {factor!r}; expected a finite number of zero or more.")
        likelihood = None if self.log_likelihood is None else self.log_likelihood * factor
        return replace(
            self,
            total=self.total * factor,
            n_samples=self.n_samples * float(factor),
            log_likelihood=likelihood,
        )

    __rmul__ = __mul__

    def to(self, device: torch.device, network: Network) -> Information:
        """The same information about the same weights in `network`, on `device`."""
        return replace(self, network=network, total=self.total.to(device))

    def _require_same_kind(self, other: object) -> None:
        if not isinstance(other, Information):
            raise MismatchError(f"Cannot combine Information with {type(other).__name__}.")
        for what, ours, theirs in (
            ("fisher", self.fisher, other.fisher),
            ("structure", self.structure, other.structure),
            ("parameters", self.selection, other.selection),
            ("number of classes", self.n_classes, other.n_classes),
            ("weights (fingerprint)", self.network.fingerprint, other.network.fingerprint),
        ):
            if ours != theirs:
                shown = "" if what == "parameters" else f": {ours} and {theirs}"
                raise MismatchError(f"Information of different {what} cannot be combined{shown}.")
        if self.total.matrix.device != other.total.matrix.device:
            raise MismatchError(
                f"Information on {self.total.matrix.device} and on {other.total.matrix.device} cannot be combined; "
                "move one of them first."
            )


def collect(
    model: nn.Module,
    data: Any,
    *,
    last_layers: int | None = None,
    parameters: str | Sequence[str] | None = None,
    fisher: str = "ggn",
    structure: str = "dense",
    precision: str | None = None,
    unpack: Unpack | None = None,
    progress: bool = False,
) -> Information:
    """One pass over `data`: the information that they hold about the chosen parameters at the model's weights.

    Labels are not needed; where batches have them, Σ ln f_y is summed as well, for `Posterior.log_evidence`.

    Args:
        model: a trained classifier that returns logits; never modified.
        data: a Dataset, a DataLoader or an iterable of batches, read once.
        last_layers: the parameters of the r layers that run last.
        parameters: module or parameter names, or "all"; give either this or `last_layers`.
        fisher: "ggn", or "eta" for the paper's diagonal form.
        structure: "dense", the exact matrix.
        precision: "float64" for products in float64 although the model is not.
        unpack: a function from a batch to (args, kwargs, labels), where a batch is none of the usual forms.
        progress: show progress with the time left.
    """
    require_one_question(last_layers, parameters)
    kind = require_fisher(fisher)
    _require_option("structure", structure, ("dense",))
    _require_option("precision", precision, (None, "float64"))
    network = Network(model)
    stream = track(batches(data, unpack), "Collecting", total=count_batches(data), enabled=progress)
    with plain_execution(network.device):
        first = next(stream, None)
        if first is None:
            raise DataError("The data are empty: expected at least one batch.")
        first = network.prepare(first)
        order, logits = network.execution_order(first)
        selection = select(network, order, last_layers=last_layers, parameters=parameters)
        require_dense_memory(selection.n_parameters, network.device)
        empty = Information(
            network=network,
            selection=selection,
            total=DenseSum.zero(selection.n_parameters, network.device),
            fisher=kind,
            n_samples=0,
            n_classes=logits.shape[1],
            log_likelihood=0.0,
            precision=precision,  # type: ignore[arg-type]
        )
        return accumulate(empty, _chain(first, stream))


def accumulate(
    empty: Information, stream: Iterator[Batch], keep: list[Float[Tensor, "k n"]] | None = None
) -> Information:
    """Fill an empty `Information` with a stream of batches; with `keep`, their rows U_nᵀ are appended there."""
    total, count = empty.total, 0
    likelihood: float | None = 0.0
    with plain_execution(empty.network.device):
        for batch in stream:
            logits = []
            for part in chunks(empty.network.prepare(batch), classes=empty.n_classes, n_parameters=empty.n_parameters):
                rows, part_logits = weighted_jacobians(empty, part)
                total.accumulate(rows)
                logits.append(part_logits)
                if keep is not None:
                    keep.append(rows)
            likelihood = _combined(likelihood, _label_likelihood(torch.cat(logits), batch.labels), 1)
            count += len(batch)
    if count == 0:
        raise DataError("The data are empty: expected at least one batch.")
    return replace(empty, total=total, n_samples=count, log_likelihood=likelihood)


def weighted_jacobians(kind: Information, batch: Batch) -> tuple[Float[Tensor, "k n"], Float[Tensor, "B M"]]:
    """The rows U_nᵀ = R_nᵀ J_n of a prepared batch, in the dtype of products, and the logits."""
    logits = kind.network.logits(batch)
    require_finite_logits(logits)
    root = fisher_root(logits, kind.fisher).to(kind.dtype)
    jacobian = jacobians(kind.network, kind.selection, batch).to(kind.dtype)
    return (root.mT @ jacobian).reshape(-1, kind.n_parameters), logits


def _label_likelihood(logits: Float[Tensor, "B M"], labels: Any) -> float | None:
    if labels is None:
        return None
    values = checked_labels(labels, size=len(logits), classes=logits.shape[1], device=logits.device)
    log_probability = torch.log_softmax(logits.double(), 1)
    return float(log_probability.gather(1, values[:, None]).sum())


def _combined(first: float | None, second: float | None, sign: int) -> float | None:
    return None if first is None or second is None else first + sign * second


def _chain(first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    yield from rest


def _require_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = " or ".join(repr(option) for option in allowed)
        raise ArgumentError(f"{name} is {value!r}; expected {listed}.")
