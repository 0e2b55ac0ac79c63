"""`collect`: one pass over the data gives their `Information`.

`accumulate` is the mathematics, in one process; ranks and checkpoints go around it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.checks import Checks, require_option
from errbar._base.execution import plain_execution
from errbar._curvature.fisher import Fisher, require_fisher
from errbar._curvature.layout import inspect
from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._curvature.registry import structure_called, structure_names
from errbar._curvature.structure import Rows
from errbar._curvature.task import Task
from errbar._distributed.shards import first_batch_of, opened
from errbar._distributed.team import Team, team_of
from errbar._model.batch import Batch, Unpack, checked_labels, kept_unpack
from errbar._model.network import Network, Output, require_finite_logits
from errbar._model.selection import require_one_question
from errbar._planning.choice import require_fits, structure_that_fits
from errbar._posterior.information import Information
from errbar.errors import DataError

DEFAULT_EVERY = 100


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
            a `StructureNotice` if that is not exact; "kron" gives one of layers that it takes as "diag" does.
            `errbar.plan` says what each costs.
        rank: of the sketch; for `structure="lowrank"` alone.
        precision: "float64" for products in float64 although the model is not.
        unpack: a function from a batch to (args, kwargs, labels), where a batch is none of the usual forms. What is
            made of these data keeps it, and reads later batches with it unless given another.
        output: where the logits are in what the model returns, if that is more: a position, a key, or a function of it.
        checkpoint: a file that keeps what was done. The same call continues there after an interruption; it is kept
            at the end, and a call with other data, weights or options refuses it. Each of
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
            from errbar._files.checkpoint import require_checkpoint

            file = require_checkpoint(checkpoint, every, rank=team.rank, ranks=team.size)
        kind = require_fisher(fisher)
        require_option("structure", structure, (*structure_names(), "auto"))
        require_option("precision", precision, (None, "float64"))
        return file, kind, Network(model, output)

    file, kind, network = team.together(checked)
    stream = opened(data, unpack, team, title="Collecting", progress=progress)
    first = next(stream, None)
    example = first_batch_of(first, team)

    form = None if unpack is None else example.batch.form
    kept = kept_unpack(unpack, form)

    def asked() -> tuple[Task, Batch]:
        with plain_execution(network.device):
            batch = network.prepare(example.batch, Checks(network.device))
            inspection = inspect(network, batch)
            inspection.require_gauge(kind)
            layout = inspection.layout
            task = Task(
                network,
                inspection.selected(last_layers=last_layers, parameters=parameters),
                structure,
                kind,
                layout.classes,
                precision,  # type: ignore[arg-type]
                layout=layout,
                batch_size=example.size or len(batch),
                unpack=kept,
                batch_form=form,
            )
            del inspection  # the graph behind it
            return replace(task, structure=structure_that_fits(task, rank)) if structure == "auto" else task, batch

    task, batch = team.together(asked)
    # What fits on every rank is what fits on the one with the least memory.
    taken = max(team.exchange(task.structure), key=structure_names().index)

    def planned() -> Task:
        with plain_execution(network.device):
            chosen = structure_called(taken)
            route = chosen.route(network, task.selection, batch)
            return replace(task, structure=taken, rank=chosen.rank(rank), route=route)

    task = team.together(planned)
    team.require_same(task.facts())
    whole = stream if first is None else chain([first], stream)
    if file is None:
        information = accumulate_over(team, task, whole)
    else:
        information = _combined_over(
            team, lambda: _accumulate_in_parts(task, whole, file, every, may_be_empty=not team.is_alone)
        )
    if information.total.is_zero():
        warnings.warn(
            "The data hold no information at all: the model is so sure of every sample that Λ = diag f − f fᵀ is "
            "exactly zero, and the posterior is the prior. Check that the model returns logits of a sensible size.",
            UserWarning,
            stacklevel=2,
        )
    return information


def _accumulate_in_parts(
    task: Task, stream: Iterator[Batch], path: str, every: int, *, may_be_empty: bool
) -> Information:
    """The information of a stream, stored after every so many batches, from where a checkpoint left off."""
    from errbar._files.checkpoint import CountedStream, resume, store

    counted = CountedStream(stream)
    total = resume(path, task, counted)
    while not counted.at_end:
        more = accumulate(task, counted.part(every))
        total = more if total is None else total + more
        store(path, total, counted)
    return accumulate(task, iter(()), may_be_empty=may_be_empty) if total is None else total


def accumulate_over(team: Team, task: Task, stream: Iterator[Batch], keep: Rows | None = None) -> Information:
    """The information of what all ranks of a team read, the same on each of them. A collective call."""
    return _combined_over(team, lambda: accumulate(task, stream, keep, may_be_empty=not team.is_alone))


def _combined_over(team: Team, accumulated: Callable[[], Information]) -> Information:
    """The sum of what each rank of a team makes of its part."""
    own = team.together(accumulated)
    if team.is_alone:
        return own
    parts = team.exchange((own.n_samples, own.log_likelihood))
    counts = [count for count, _ in parts]
    likelihoods = [likelihood for count, likelihood in parts if count > 0]
    if not likelihoods:
        raise DataError("The data are empty on all ranks: expected at least one batch.")
    return replace(
        own,
        total=own.total.reduced([count > 0 for count in counts], team),
        n_samples=sum(counts),
        log_likelihood=None if None in likelihoods else sum(likelihoods),
    )


def accumulate(
    task: Task,
    stream: Iterator[Batch],
    keep: Rows | None = None,
    *,
    may_be_empty: bool = False,
) -> Information:
    """The information of a stream of batches; with `keep`, the rows U_nᵀ of all samples are appended there."""
    require_fits(task)
    network = task.network
    checks = Checks(network.device)
    count = 0
    likelihood: Tensor | None = torch.zeros((), dtype=torch.float64, device=network.device)
    with plain_execution(network.device):
        total = structure_called(task.structure).accumulator(task, keep)
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
