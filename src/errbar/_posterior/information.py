"""`collect`: one pass over the data gives their `Information` about the parameters, which adds up.

Information of batches, ranks, sites and days is the same `+`; forgetting is `−`; discounting is `* 0.9`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.checks import Checks
from errbar._base.container import write
from errbar._base.execution import plain_execution
from errbar._curvature.fisher import Fisher, require_fisher
from errbar._curvature.workload import Structure
from errbar._derivative.inspection import Inspection, inspect
from errbar._distributed.reduce import reduced
from errbar._distributed.shards import first_batch_of, opened
from errbar._distributed.team import Team, team_of
from errbar._files.checkpoint import DEFAULT_EVERY, CountedStream, require_checkpoint, resume, store
from errbar._files.task import SavedInformation, checked_classes, information_record
from errbar._model.batch import Batch, Unpack, checked_labels, kept_unpack
from errbar._model.network import Network, Output, require_finite_logits
from errbar._model.selection import Selection, require_one_question, select
from errbar._posterior.differentiate import DEFAULT_RANK, STRUCTURES, Sum, is_zero, structure_that_fits, way
from errbar._posterior.task import Task, output_given, product_dtype
from errbar.errors import ArgumentError, DataError, ForgetError, MismatchError


@dataclass(frozen=True, eq=False)
class Information:
    """What the data said about the parameters, without a prior: Σ_n J_nᵀ Λ_n J_n and how many samples it sums.

    `log_likelihood` is Σ ln f_y(x; θ̂) where the data had labels, and None where they had not.
    """

    task: Task
    total: Sum
    n_samples: float
    log_likelihood: float | None

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
    def structure(self) -> Structure:
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

    def __add__(self, other: Information) -> Information:
        self._require_same_kind(other)
        return replace(
            self,
            task=self._task_of_both(other),
            total=self.total + other.total,  # type: ignore[operator]
            n_samples=self.n_samples + other.n_samples,
            log_likelihood=_combined(self.log_likelihood, other.log_likelihood, 1),
        )

    def __radd__(self, other: object) -> Information:
        """So that `sum(days)` works, which starts at 0."""
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: Information) -> Information:
        """Forget: refuses more samples than were seen, and what leaves less than no information."""
        self._require_same_kind(other)
        if other.n_samples > self.n_samples * (1 + 1e-12):
            raise ForgetError(
                f"Cannot forget {other.n_samples:g} samples: the information is of {self.n_samples:g} only."
            )
        task = self._task_of_both(other)
        total: Any = self.total - other.total  # type: ignore[operator]
        if not total.is_positive_semidefinite(self.total.tolerance(task.dtype)):  # type: ignore[union-attr]
            raise ForgetError(
                "Forgetting these data would leave negative information, so they were not among the data seen. "
                "Expected data that were part of the fit, unchanged."
            )
        return replace(
            self,
            task=task,
            total=total,
            # Discounts round, and what rounding leaves of nothing is nothing.
            n_samples=max(self.n_samples - other.n_samples, 0),
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
        return replace(self, task=self.task.on(network), total=self.total.to(device))

    def with_model(self, model: nn.Module, *, unpack: Unpack | None = None, output: Output = None) -> Information:
        """The same information with the model that it is about; for information that came from a file.

        `unpack` and `output` as in `collect`: files hold no functions, so a fit that had one has to be given it again.
        Without `unpack`, batches are read as if the fit had had none.
        """
        bound = self.about(Network(model, output_given(self.network.output, output)))
        return replace(bound, task=bound.task.reading(unpack))

    def about(self, network: Network) -> Information:
        """The same information about the same weights in `network`; `MismatchError` for other weights."""
        if not network.same_weights(self.network):
            raise MismatchError(
                "The model has other weights than the information is about: their fingerprints (SHA-256) are "
                f"{network.fingerprint[:12]}… and {self.network.fingerprint[:12]}…. Give the model of the fit, with "
                "the weights and the dtype that it had."
            )
        return self.to(network.device, network)

    def save(self, path: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> None:
        """Write a safetensors file for `errbar.merge`: no prior, no data, no code; `classes` are names for people.

        The file is replaced as a whole: on a full disk, or if the process is killed, the one before is unharmed.
        """
        saved = SavedInformation(
            self.task, self.total, self.n_samples, self.log_likelihood, checked_classes(classes, self.n_classes)
        )
        write(path, "information", *information_record(saved))

    def _task_of_both(self, other: Information) -> Task:
        """The task of what two operands make: with the products of the rougher one, and with a model if one has it."""
        with_model = self.task if self.task.has_model else other.task
        made = with_model
        if self.dtype != other.dtype:
            rough = min(self.task, other.task, key=lambda task: task.dtype.itemsize)
            made = rough.on(with_model.network) if with_model.has_model and not rough.has_model else rough
        reading = self.task if self.task.batch_form is not None else other.task
        return replace(made, unpack=self.task.unpack or other.task.unpack, batch_form=reading.batch_form)

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


def collect(
    model: nn.Module,
    data: Any,
    *,
    last_layers: int | None = None,
    parameters: str | Sequence[str] | None = None,
    fisher: str = "ggn",
    structure: str = "dense",
    rank: int = DEFAULT_RANK,
    precision: str | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int = DEFAULT_EVERY,
    group: Any = None,
    progress: bool = False,
) -> Information:
    """One pass over `data`: the information that they hold about the chosen parameters at the model's weights.

    Labels are not needed; where batches have them, Σ ln f_y is summed as well, for `Posterior.log_evidence`.

    Args:
        model: a trained classifier that returns logits; never modified.
        data: a Dataset, a DataLoader or an iterable of batches, read once.
        last_layers: the parameters of the r layers that run last and that the logits depend on.
        parameters: module or parameter names, "all", or "trainable" for those that require gradients (adapters in a
            frozen network); give either this or `last_layers`.
        fisher: "ggn", or "eta" for the paper's diagonal form.
        structure: "dense", the exact matrix; "block", exact within each layer; "kron", "diag"; or "lowrank", a sketch
            for whole networks. "auto" takes the first of dense, block, kron, lowrank, diag that fits into memory, with
            a `StructureNotice` if that is not exact; "kron" gives one of layers that it takes as "diag" does. See
            `_posterior.differentiate`, and `errbar.plan` for what each costs.
        rank: of the sketch; for `structure="lowrank"` alone.
        precision: "float64" for products in float64 although the model is not.
        unpack: a function from a batch to (args, kwargs, labels), where a batch is none of the usual forms. What is
            made of these data keeps it, and reads later batches with it unless given another.
        output: where the logits are in what the model returns, if that is more: a position, a key, or a function of it.
        checkpoint: a file that keeps what was done. The same call continues there after an interruption; it is kept
            at the end, and a call with other data, weights or options refuses it. See `_files.checkpoint`. Each of
            several ranks has a file of its own, with its number at the end of the name.
        every: how many batches there are from one checkpoint to the next.
        group: None for all ranks of an initialised torch.distributed job, which all have to make this call and get
            the same result; False for this process alone; or a ProcessGroup. `_distributed.shards` says who reads what.
        progress: show progress with the time left.
    """
    team = team_of(group)

    def checked() -> tuple[str | None, Fisher, Network]:
        require_one_question(last_layers, parameters)
        file = None
        if checkpoint is not None:
            file = require_checkpoint(checkpoint, every, rank=team.rank, ranks=team.size)
        kind = require_fisher(fisher)
        require_option("structure", structure, (*STRUCTURES, "auto"))
        require_option("precision", precision, (None, "float64"))
        return file, kind, Network(model, output)

    file, kind, network = team.together(checked)
    stream = opened(data, unpack, team, title="Collecting", progress=progress)
    first = next(stream, None)
    probe = first_batch_of(first, team)
    dtype = product_dtype(network, precision)  # type: ignore[arg-type]

    def surveyed() -> tuple[Batch, Inspection, Selection, str]:
        with plain_execution(network.device):
            prepared = network.prepare(probe.batch, Checks(network.device))
            found = inspect(network, prepared)
            found.require_gauge(kind)
            selection = select(network, found.layers, last_layers=last_layers, parameters=parameters, idle=found.idle)
            found.require_dependence(selection, parameters)
            if last_layers is not None:
                found.warn_of_skipped(selection)
            fitting = structure
            if structure == "auto":
                fitting = structure_that_fits(
                    network, selection, prepared, found.layers, fisher=kind, dtype=dtype, rank=rank, size=probe.size
                )
        return prepared, found, selection, fitting

    prepared, found, selection, fitting = team.together(surveyed)
    n_classes, layers = found.logits.shape[1], found.layers
    del found  # the graph behind it
    # What fits on every rank is what fits on the one with the least memory.
    taken = max(team.exchange(fitting), key=STRUCTURES.index)

    def planned() -> Task:
        with plain_execution(network.device):
            chosen = way(
                taken,
                network,
                selection,
                prepared,
                layers,
                fisher=kind,
                n_classes=n_classes,
                dtype=dtype,
                rank=rank,
                size=probe.size,
            )
        form = None if unpack is None else probe.batch.form
        kept = kept_unpack(unpack, form)
        return Task(network, selection, taken, chosen, kind, n_classes, precision, kept, form)  # type: ignore[arg-type]

    task = team.together(planned)
    team.require_same(task.facts())
    whole = stream if first is None else _chain(first, stream)
    if file is None:
        information = accumulate_over(team, task, whole)
    else:
        information = _combined_over(
            team, lambda: _accumulate_in_parts(task, CountedStream(whole), file, every, not team.is_alone)
        )
    if is_zero(information.total):
        warnings.warn(
            "The data hold no information at all: the model is so sure of every sample that Λ = diag f − f fᵀ is "
            "exactly zero, and the posterior is the prior. Check that the model returns logits of a sensible size.",
            UserWarning,
            stacklevel=2,
        )
    return information


def _accumulate_in_parts(
    task: Task, seen: CountedStream, path: str | os.PathLike[str], every: int, may_be_empty: bool
) -> Information:
    """The information of a stream, stored after every so many batches, from where a checkpoint left off."""
    total: Information | None = None
    saved = resume(path, task, seen)
    if saved is not None:
        total = Information(task, saved.total.to(task.network.device), saved.n_samples, saved.log_likelihood)
    while not seen.at_end:
        more = accumulate(task, seen.part(every))
        total = more if total is None else total + more
        store(path, SavedInformation(task, total.total, total.n_samples, total.log_likelihood, None), seen)
    return accumulate(task, iter(()), may_be_empty=may_be_empty) if total is None else total


def accumulate_over(
    team: Team, task: Task, stream: Iterator[Batch], keep: list[Float[Tensor, "k n"]] | None = None
) -> Information:
    """The information of what all ranks of a team read, the same on each of them. A collective call."""
    return _combined_over(team, lambda: accumulate(task, stream, keep, may_be_empty=not team.is_alone))


def _combined_over(team: Team, accumulated: Callable[[], Information]) -> Information:
    """The sum of what each rank of a team makes of its part."""
    own = team.together(accumulated)
    if team.is_alone:
        return own
    told = team.exchange((own.n_samples, own.log_likelihood))
    counts = [count for count, _ in told]
    likelihoods = [likelihood for count, likelihood in told if count > 0]
    if not likelihoods:
        raise DataError("The data are empty on all ranks: expected at least one batch.")
    return replace(
        own,
        total=reduced(own.total, [count > 0 for count in counts], team),
        n_samples=sum(counts),
        log_likelihood=None if None in likelihoods else sum(likelihoods),
    )


def accumulate(
    task: Task,
    stream: Iterator[Batch],
    keep: list[Float[Tensor, "k n"]] | None = None,
    *,
    may_be_empty: bool = False,
) -> Information:
    """The information of a stream of batches; with `keep`, the rows U_nᵀ of all samples are appended there."""
    network = task.network
    checks = Checks(network.device)
    count = 0
    likelihood: Tensor | None = torch.zeros((), dtype=torch.float64, device=network.device)
    with plain_execution(network.device):
        total = task.way.accumulator(keep)
        for batch in stream:
            logits = total.add_batch(network.prepare(batch, checks))
            require_finite_logits(logits, checks)
            if likelihood is not None and batch.labels is not None:
                likelihood = likelihood + _label_likelihood(logits, batch.labels, checks)
            else:
                likelihood = None
            count += len(batch)
        if count == 0 and not may_be_empty:
            raise DataError("The data are empty: expected at least one batch.")
        checks.finish()
        summed = total.finish()
    return Information(
        task=task,
        total=summed,
        n_samples=count,
        log_likelihood=None if likelihood is None else float(likelihood),
    )


def _label_likelihood(logits: Float[Tensor, "B M"], labels: Any, checks: Checks) -> Float[Tensor, ""]:
    values = checked_labels(labels, size=len(logits), classes=logits.shape[1], device=logits.device, checks=checks)
    log_probability = torch.log_softmax(logits.double(), 1)
    # A label out of range is reported by `checks`; it must not stop the device before that.
    return log_probability.gather(1, values.clamp(0, logits.shape[1] - 1)[:, None]).sum()


def _combined(first: float | None, second: float | None, sign: int) -> float | None:
    return None if first is None or second is None else first + sign * second


def _chain(first: Batch, rest: Iterator[Batch]) -> Iterator[Batch]:
    yield first
    yield from rest


def require_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        listed = " or ".join(repr(option) for option in allowed)
        raise ArgumentError(f"{name} is {value!r}; expected {listed}.")
