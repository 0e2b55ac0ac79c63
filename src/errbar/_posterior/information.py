"""`Information`: what data say about the parameters, without a prior. It adds up.

Information of batches, ranks, sites and days is the same `+`; forgetting is `−`; discounting is `* 0.9`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._curvature.fisher import Fisher
from errbar._curvature.structure import Sum
from errbar._curvature.task import Task, output_given
from errbar._model.batch import Unpack
from errbar._model.network import Network, Output
from errbar._model.selection import Selection
from errbar._posterior.seen import Seen
from errbar.errors import ArgumentError, ForgetError, MismatchError


@dataclass(frozen=True, eq=False)
class Information:
    """What the data say about the parameters, without a prior: Σ_n J_nᵀ Λ_n J_n and the number of samples in it.

    `log_likelihood` is Σ ln f_y(x; θ̂), or None if the data had no labels. `seen` tells whether a sample was among the
    data, or is None where that is not known.
    """

    task: Task
    total: Sum
    n_samples: float
    log_likelihood: float | None
    seen: Seen | None = None

    @property
    def model(self) -> nn.Module:
        """The model as the user gave it."""
        return self.network.model

    @property
    def network(self) -> Network:
        return self.task.network

    @property
    def selection(self) -> Selection:
        return self.task.selection

    @property
    def fisher(self) -> Fisher:
        return self.task.fisher

    @property
    def outputs(self) -> str:
        """What the outputs of the model mean: "classes", "labels" or "positions"."""
        return self.task.outputs

    @property
    def structure(self) -> str:
        return self.task.structure

    @property
    def n_classes(self) -> int:
        return self.task.n_classes

    @property
    def n_parameters(self) -> int:
        return self.selection.n_parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        return self.selection.names

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return self.task.dtype

    def dense(self) -> Float[Tensor, "n n"]:
        """The information matrix, float64."""
        return self.total.dense()

    def __repr__(self) -> str:
        return f"Information: {self.described()}"

    def described(self) -> str:
        """Of what, and from how much, in one line."""
        layers = len({name.rpartition(".")[0] for name in self.parameter_names})
        exact = "exact, " * (self.structure == "dense")
        kind = f"{self.structure if len(self.structure) <= 40 else 'mixed'}, {exact}{self.fisher}"
        return (
            f"{self.n_parameters:,} parameter{'s' * (self.n_parameters != 1)} of {layers} layer{'s' * (layers != 1)} "
            f"({kind}), {self.n_samples:,g} samples"
        )

    def __add__(self, other: Information) -> Information:
        self._require_same_kind(other)
        return replace(
            self,
            task=self._task_of_both(other),
            total=self.total + other.total,
            n_samples=self.n_samples + other.n_samples,
            log_likelihood=_combined(self.log_likelihood, other.log_likelihood, 1),
            seen=None if self.seen is None or other.seen is None else self.seen + other.seen,
        )

    def __radd__(self, other: object) -> Information:
        """So that `sum(days)` works, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: Information) -> Information:
        """Forget: refuses more samples than were seen, and data whose removal leaves negative information."""
        self._require_same_kind(other)
        if other.n_samples > self.n_samples * (1 + 1e-12):
            raise ForgetError(
                f"Cannot forget {other.n_samples:g} samples: the information holds only {self.n_samples:g}."
            )
        task = self._task_of_both(other)
        total = self.total - other.total
        if not total.is_positive_semidefinite(self.total.tolerance(task.dtype)):
            raise ForgetError(
                "Forgetting these data would leave negative information, so they were not among the data seen. "
                "Expected data that were part of the fit, unchanged."
            )
        return replace(
            self,
            task=task,
            total=total,
            # Discounts round, so a count of zero may come out slightly negative.
            n_samples=max(self.n_samples - other.n_samples, 0),
            log_likelihood=_combined(self.log_likelihood, other.log_likelihood, -1),
            seen=None if self.seen is None or other.seen is None else self.seen - other.seen,
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
        return replace(self, task=self.task.on(network), total=self.total.to(device))

    def with_model(self, model: nn.Module, *, unpack: Unpack | None = None, output: Output = None) -> Information:
        """The same information with its model; for information from a file.

        `unpack` and `output` as in `collect`: files hold no functions, so these must be given again.
        Without `unpack`, batches are read as if the fit had had none.
        """
        bound = self.about(Network(model, output_given(self.network.output, output), self.network.kind))
        return replace(bound, task=bound.task.reading(unpack))

    def about(self, network: Network) -> Information:
        """The same information about the same weights in `network`; `MismatchError` for other weights."""
        if not network.same_weights(self.network):
            raise MismatchError(
                "The model has other weights than those of the fit: their fingerprints (SHA-256) are "
                f"{network.fingerprint[:12]}… and {self.network.fingerprint[:12]}…. Give the model of the fit, with "
                "the weights and the dtype that it had."
            )
        return self.to(network.device, network)

    def save(self, path: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> None:
        """Write a safetensors file for `errbar.merge`: no prior, no data, no code; `classes` are names for people.

        The file is replaced as a whole: if the disk is full or the process is killed, the previous file stays intact.
        """
        from errbar._files.save import save_information

        save_information(self, path, classes)

    def _task_of_both(self, other: Information) -> Task:
        """The task of a sum or difference: with the products of the coarser operand, and a model if one has it."""
        with_model = self.task if self.network.has_model else other.task
        result = with_model
        if self.dtype != other.dtype:
            coarser = min(self.task, other.task, key=lambda task: task.dtype.itemsize)
            lacks_model = with_model.network.has_model and not coarser.network.has_model
            result = coarser.on(with_model.network) if lacks_model else coarser
        form_task = self.task if self.task.batch_form is not None else other.task
        return replace(result, unpack=self.task.unpack or other.task.unpack, batch_form=form_task.batch_form)

    def _require_same_kind(self, other: object) -> None:
        if not isinstance(other, Information):
            raise MismatchError(f"Cannot combine Information with {type(other).__name__}.")
        self.task.require_same_kind(other.task)
        if type(self.total) is not type(other.total):
            raise MismatchError(
                "Information that was summed in different forms cannot be combined: the first batches of the two "
                "showed different layers."
            )
        if self.total.device != other.total.device:
            raise MismatchError(
                f"Information on {self.total.device} and on {other.total.device} cannot be combined; "
                "move one of them first."
            )


def _combined(first: float | None, second: float | None, sign: int) -> float | None:
    return None if first is None or second is None else first + sign * second
