"""`collect`: one pass over the data gives their `Information`.

`accumulate` is the mathematics, in one process; ranks and checkpoints go around it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain, product
from operator import add
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from errbar._base.checks import Checks, require_option, whole_number
from errbar._base.execution import plain_execution
from errbar._curvature.fisher import require_fisher
from errbar._curvature.layout import inspect
from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._curvature.positions import (
    Positions,
    batch_shape,
    position_weights,
    require_share,
    scores_of_positions,
    with_flat_labels,
)
from errbar._curvature.registry import faithfulness, require_structure, structure_called, structure_of
from errbar._curvature.scores import Repeats, ScoreDraws, require_draws
from errbar._curvature.structure import Rows
from errbar._curvature.task import Task
from errbar._distributed.shards import first_batch_of, opened, stream_of
from errbar._distributed.team import Team, team_of
from errbar._distributions.sampling import require_seed
from errbar._model.batch import Batch, Unpack, checked_weights, count_batches, kept_unpack, pieces
from errbar._model.network import Network, Output, require_finite_logits
from errbar._model.outputs import CLASSES, POSITIONS, kind_called
from errbar._model.positions import IGNORE_INDEX, HeadNetwork, PositionsNetwork, label_shape_error
from errbar._model.selection import Selection, listed, require_one_question
from errbar._planning.choice import require_fits, structure_that_fits
from errbar._planning.notice import tell_of_fit
from errbar._posterior.information import Information
from errbar._posterior.seen import Seen, SeenSoFar
from errbar.errors import ArgumentError, DataError, LabelError

DEFAULT_EVERY = 100
_TITLE = "Collecting"


def collect(
    model: nn.Module,
    data: Any,
    *,
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
) -> Information:
    """One pass over `data`: their information about the selected parameters at the model's weights.

    Labels are not needed; if batches have them, Σ ln f_y is summed as well, for `Posterior.log_evidence`. Batches may
    have a weight for each sample, as `weights` in a mapping or as a fourth value of `unpack`: a sample of weight w
    counts like w of them, in Σ w_n J_nᵀ Λ_n J_n, `n_samples` and Σ w ln f_y.

    Args:
        model: a trained classifier that returns logits; never modified.
        data: a Dataset, a DataLoader or an iterable of batches, read once.
        last_layers: the parameters of the r layers that run last and that the logits depend on.
        parameters: module or parameter names; "all"; "trainable" for those that require gradients (adapters in a frozen
            network); or "vectors" for the last layer and every parameter of at most one dimension (scales and shifts
            of norm layers, biases). Give either this or `last_layers`.
        fisher: "ggn", "eta" for the paper's diagonal form, or "sampled": an unbiased estimate of "ggn" by labels drawn
            from the network, which costs as many backward passes as there are draws, whatever the number of classes.
        draws: labels drawn for each sample, and
        seed: of those draws; for `fisher="sampled"` alone. A draw follows from the seed and the numbers of its sample,
            so samples that are equal have equal draws.
        structure: "dense", the exact matrix; "block", exact within each layer; "kron", "diag"; or "lowrank", a sketch
            for whole networks. Or several of them: {"fc": "kron", "*": "block"}, by names of modules or parameters,
            of which the longest that fits decides, and "*" for all others; as text "fc=kron,*=block". "auto" takes the
            first of dense, block, a mixture of block and kron, kron, lowrank, diag that fits into memory, with a
            `StructureNotice` if that is not exact; so does "kron" about layers that it treats as "diag" does.
            `errbar.plan` shows the cost of each.
        rank: of the sketch; only for `structure="lowrank"`.
        precision: "float64" for products in float64 even if the model is not.
        unpack: a function from a batch to (args, kwargs, labels), for batches of any other form. The result keeps it,
            and reads later batches with it unless given another.
        output: where the logits are if the model returns more than them: a position, a key, or a function of it.
        outputs: what the logits mean: "classes", one of M by a softmax; "labels", L that are true or false by a
            sigmoid each, with labels (B, L) of 0, 1 and −1 for a missing one, which then adds no information; or
            "positions", logits (B, T, M) of tokens or (B, M, H, W) of pixels, with a class number for each. Parameters
            that are not all in the layer that returns these logits need `fisher="sampled"`.
        class_weights: a weight for each class, for networks that were trained by a loss with such weights: each sample
            counts by that of its label, beside its own weight, and each position by that of its own; `n_samples` counts
            positions only by their inputs. It needs labels, here and in `update` and `forget`.
        checkpoint: a file for intermediate results. After an interruption the same call continues from it; a call with
            other data, weights or options refuses it. The file is kept at the end. Each of several ranks has its own
            file, with its number at the end of the name.
        every: the number of batches from one checkpoint to the next.
        group: None for all ranks of an initialised torch.distributed job, which must all make this call and get the
            same result; False for this process alone; or a ProcessGroup. `_distributed.shards` says who reads what.
        progress: show progress with the time left.
        positions: the share of the positions that counts, for `outputs="positions"`: with 0.1 a tenth of them, each
            with the weight 10. Which ones follows from `seed` and the numbers of the input.
        ignore_index: the label of positions without one, which add nothing.
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
    return collected(request, data, group=group, progress=progress)[0]


def collected(
    request: Request, data: Any, *, group: Any, progress: bool, stacklevel: int = 3
) -> tuple[Information, Batch | None]:
    """The information of all ranks, and the first batch that this rank read, if it read any."""
    team = team_of(group)
    first: Batch | None
    if team.is_alone:
        information, first = _collect_alone(request, data, progress=progress)
    else:
        information, first = _collect_over(team, request, data, progress=progress)
    if information.total.is_zero():
        missing = "" if information.task.kind.has_gauge else ", unless all labels are missing"
        missing = missing if information.task.positions is None else ", unless no position has a label"
        warnings.warn(
            "The data hold no information at all: the model is so certain of every sample that Λ, the Fisher "
            f"information of a label, is exactly zero{missing}, and the posterior is the prior. Check that the model "
            "returns logits of a sensible size.",
            UserWarning,
            stacklevel=stacklevel,
        )
    return information, first


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of a call of `collect`, as the user gave them."""

    model: nn.Module
    last_layers: int | None = None
    parameters: str | Sequence[str] | None = None
    fisher: str = "ggn"
    draws: int = 1
    seed: int = 0
    structure: str | Mapping[str, str] = "dense"
    rank: int = DEFAULT_RANK
    precision: str | None = None
    unpack: Unpack | None = None
    output: Output = None
    outputs: str = "classes"
    class_weights: Any = None
    checkpoint: str | os.PathLike[str] | None = None
    every: int = DEFAULT_EVERY
    positions: float = 1.0
    ignore_index: int = IGNORE_INDEX

    def checked(self, rank: int = 0, ranks: int = 1) -> tuple[str | None, Network]:
        """The checkpoint file of this rank and the network, after all checks that need no data."""
        require_one_question(self.last_layers, self.parameters)
        file = None
        if self.checkpoint is not None:
            from errbar._files.checkpoint import require_checkpoint

            file = require_checkpoint(self.checkpoint, self.every, rank=rank, ranks=ranks)
        require_fisher(self.fisher)
        kind = kind_called(self.outputs)
        require_draws(self.draws)
        require_seed(self.seed)
        require_structure(self.structure)
        require_option("precision", self.precision, (None, "float64"))
        if self.outputs != POSITIONS and (self.positions != 1.0 or self.ignore_index != IGNORE_INDEX):
            raise ArgumentError(
                "positions= and ignore_index= are for outputs='positions'; leave them out, or pass that."
            )
        if self.outputs == POSITIONS:
            return file, PositionsNetwork(self.model, self.output)
        return file, Network(self.model, self.output, kind)

    def task(self, network: Network, first: Batch, size: int) -> tuple[Task, Batch]:
        """The task without its route, and the first batch prepared; batches are expected to have `size`."""
        with plain_execution(network.device):
            batch = network.prepare(first, Checks(network.device))
            inspection = inspect(network, batch)
            inspection.require_gauge(self.fisher)
            selection = inspection.selected(last_layers=self.last_layers, parameters=self.parameters)
            classes, positions = inspection.layout.classes, None
            if isinstance(network, PositionsNetwork):
                classes = int(network.shaped(batch.rows(0, 1)).shape[-1])
                positions = self._positions(network, batch, selection)
                if positions.head is not None:
                    # From here on the layer that returns the logits is the network, and a position is a sample.
                    network = HeadNetwork(network, positions.head)
                    batch, leading = network.rows(batch)
                    size *= len(batch) // leading[0]
                    inspection = inspect(network, batch)
                    selection = inspection.selected(last_layers=None, parameters=selection.names)
            form = None if self.unpack is None else first.form
            class_weights = self._weights_of_classes(classes)
            scores = ScoreDraws(self.draws, self.seed, network.kind) if self.fisher == "sampled" else None
            task = Task(
                network,
                selection,
                require_structure(self.structure),
                self.fisher,  # type: ignore[arg-type]
                classes,
                self.precision,  # type: ignore[arg-type]
                layout=inspection.layout,
                batch_size=size,
                unpack=kept_unpack(self.unpack, form),
                batch_form=form,
                scores=scores_of_positions(scores, positions, classes, class_weights),
                positions=positions,
                class_weights=class_weights,
            )
            del inspection  # the graph behind it
            if task.structure == "auto":
                return replace(task, structure=structure_that_fits(task, self.rank)), batch
            return replace(task, structure=structure_of(task.structure, task.selection)), batch

    def _positions(self, network: PositionsNetwork, batch: Batch, selection: Selection) -> Positions:
        """How positions count; behind the last layer by drawn labels alone."""
        head = network.head(batch, selection.names)
        if head is None and self.fisher != "sampled":
            raise ArgumentError(
                f"fisher is {self.fisher!r} for parameters ({listed(selection.names)}) that are not all in the layer "
                "that returns the logits, a linear one or a convolution of one by one. For others it would take a "
                "backward pass for each class of each position; expected fisher='sampled', one for each draw.",
                arguments={"fisher": (self.fisher, "sampled")},
            )
        return Positions(head, require_share(self.positions), self.seed, self._ignored())

    def _weights_of_classes(self, classes: int) -> tuple[float, ...] | None:
        if self.class_weights is not None and self.outputs not in (CLASSES.name, POSITIONS):
            raise ArgumentError(
                f"class_weights are for one label of a sample or position, and outputs is {self.outputs!r}; expected "
                "weights of the samples in the batches, or outputs='classes' or 'positions'."
            )
        return require_class_weights(self.class_weights, classes)

    def _ignored(self) -> int:
        number = whole_number(self.ignore_index)
        if number is None:
            raise ArgumentError(
                f"ignore_index is {self.ignore_index!r}; expected the whole number that stands for no label."
            )
        return number

    def routed(self, task: Task, batch: Batch) -> Task:
        """The task with its route, which the first batch decides."""
        with plain_execution(task.network.device):
            return structure_called(task.structure).routed(task, batch, self.rank)


def _collect_alone(request: Request, data: Any, *, progress: bool) -> tuple[Information, Batch]:
    file, network = request.checked()
    stream = stream_of(data, request.unpack, title=_TITLE, progress=progress)
    first = next(stream, None)
    if first is None:
        raise DataError("The data are empty: expected at least one batch.")
    task = request.routed(*request.task(network, first, len(first)))
    count = count_batches(data)
    tell_of_fit(task, request.rank, None if count is None else count * len(first))
    whole = chain([first], stream)
    if file is None:
        return accumulate(task, whole), first
    return _accumulate_in_parts(task, whole, file, request.every), first


def _accumulate_in_parts(
    task: Task, stream: Iterator[Batch], path: str, every: int, *, may_be_empty: bool = False
) -> Information:
    """The information of a stream, stored after `every` batches, continued from a checkpoint if there is one."""
    from errbar._files.checkpoint import CountedStream, resume, store

    counted_stream = CountedStream(stream)
    total = resume(path, task, counted_stream)
    repeats = Repeats()
    while not counted_stream.at_end:
        # What a part lacks, labels of positions or weights above zero, others may have.
        part = accumulate(task, counted_stream.part(every), repeats=repeats, may_be_empty=True)
        total = part if total is None else total + part
        store(path, total, counted_stream)
    repeats.tell()
    if total is None:
        return accumulate(task, iter(()), may_be_empty=may_be_empty)
    if total.n_samples == 0 and not may_be_empty:
        raise _no_weight()
    return total


def _collect_over(team: Team, request: Request, data: Any, *, progress: bool) -> tuple[Information, Batch | None]:
    """The same by several ranks, which agree after each step. A collective call."""
    file, network = team.together(lambda: request.checked(team.rank, team.size))
    stream = opened(data, request.unpack, team, title=_TITLE, progress=progress)
    first = next(stream, None)
    example = first_batch_of(first, team)
    task, batch = team.together(lambda: request.task(network, example.batch, example.size))
    # The rank with the least memory decides for all.
    structure = max(team.exchange(task.structure), key=faithfulness)
    complete_task = team.together(lambda: request.routed(replace(task, structure=structure), batch))
    team.require_same(complete_task.facts())
    if team.leads:
        count = count_batches(data)
        tell_of_fit(complete_task, request.rank, None if count is None else count * example.size // team.size)
    whole = stream if first is None else chain([first], stream)
    if file is None:
        return accumulate_over(team, complete_task, whole), first
    parts = partial(_accumulate_in_parts, complete_task, whole, file, request.every, may_be_empty=True)
    return _summed_over(team, team.together(parts)), first


def accumulate_over(team: Team, task: Task, stream: Iterator[Batch], rows: Rows | None = None) -> Information:
    """The information of what all ranks of a team read, the same on each of them. A collective call."""
    if team.is_alone:
        return accumulate(task, stream, rows)
    return _summed_over(team, team.together(lambda: accumulate(task, stream, rows, may_be_empty=True)))


def _summed_over(team: Team, own: Information) -> Information:
    """The sum of the information of all ranks of a team."""
    seen = None if own.seen is None else (dict(own.seen.counts), own.seen.limit)
    parts = team.exchange((own.n_samples, own.log_likelihood, seen))
    counts = [count for count, _, _ in parts]
    likelihoods = [likelihood for count, likelihood, _ in parts if count > 0]
    all_seen = [None if part is None else Seen(*part) for _, _, part in parts]
    if not likelihoods:
        raise DataError("The data are empty on all ranks, or all weights are zero: expected at least one batch.")
    return replace(
        own,
        total=own.total.reduced([count > 0 for count in counts], team),
        n_samples=sum(counts),
        log_likelihood=None if None in likelihoods else sum(likelihoods),
        seen=None if None in all_seen else reduce(add, all_seen),
    )


def accumulate(
    task: Task,
    stream: Iterator[Batch],
    rows: Rows | None = None,
    *,
    may_be_empty: bool = False,
    repeats: Repeats | None = None,
) -> Information:
    """The information of a stream of batches; with `rows`, the rows U_nᵀ of all samples are appended there.

    Where labels are drawn, samples that repeat are counted: with `repeats` there, otherwise with a warning at the end.
    """
    own_repeats = Repeats() if repeats is None else repeats
    one = _Pass(task, own_repeats, rows)
    for batch in stream:
        one.add(batch)
    information = one.finish(may_be_empty=may_be_empty)
    if repeats is None:
        own_repeats.tell()
    return information


# Logits, labels and weights of what was added, if they are there.
_Added = tuple[Float[Tensor, "R M"], Tensor | None, Float[Tensor, "R"] | None]


class _Pass:
    """One pass over the data for one task, batch by batch."""

    def __init__(self, task: Task, repeats: Repeats, rows: Rows | None = None) -> None:
        structure, network = structure_called(task.structure), task.network
        require_fits(task, structure)
        self.task, self.checks, self.count, self.seen = task, Checks(network.device), 0, SeenSoFar()
        self.n_positions = 0
        # Samples that count for one each, and the weights of the others.
        self.plain, self.mass = 0, torch.zeros((), dtype=torch.float64, device=network.device)
        self.is_weighted = False
        self.likelihood: Tensor | None = torch.zeros((), dtype=torch.float64, device=network.device)
        scores = None if task.scores is None else task.scores.counting(repeats)
        with plain_execution(network.device):
            self.accumulator = structure.accumulator(replace(task, scores=scores), rows)

    def add(self, batch: Batch) -> None:
        network, checks = self.task.network, self.checks
        with plain_execution(network.device):
            prepared = network.prepare_whole(batch, checks)
            weights = _sample_weights(self.task, prepared, checks)
            prepared = replace(prepared, weights=weights)
            self.seen.add(prepared)
            logits, labels, factors = self._added(prepared)
            require_finite_logits(logits, checks)
            if self.likelihood is not None and labels is not None:
                own = network.kind.log_likelihood(logits, labels)
                self.likelihood = self.likelihood + (own.sum() if factors is None else (factors * own).sum())
            else:
                self.likelihood = None
            self.count += len(batch)
            if weights is None:
                self.plain += len(batch)
            else:
                self.is_weighted, self.mass = True, self.mass + weights.sum()

    def _added(self, batch: Batch) -> _Added:
        """Add a prepared batch: its logits, labels as the kind of outputs reads them, and weights."""
        if self.task.positions is not None:
            return self._positions_added(batch, self.task.positions)
        labelled = self._with_labels(batch)
        return self.accumulator.add_batch(labelled), labelled.labels, labelled.weights

    def _positions_added(self, batch: Batch, positions: Positions) -> _Added:
        """The same with the positions that count."""
        task, network = self.task, self.task.network
        if isinstance(network, HeadNetwork):
            rows = positions.rows(network, batch, task.n_classes, task.class_weights)
            self.n_positions += len(rows)
            if not len(rows):
                return torch.zeros(0, task.n_classes, device=network.device), rows.labels, rows.weights
            return self.accumulator.add_batch(rows), rows.labels, rows.weights
        assert isinstance(network, PositionsNetwork)
        flat = with_flat_labels(batch, task.n_classes, positions)
        logits = self.accumulator.add_batch(flat).reshape(-1, task.n_classes)
        if batch.labels is not None and tuple(batch_shape(batch.labels)) != (len(batch), *network.spatial):
            raise label_shape_error(batch_shape(batch.labels), (len(batch), *network.spatial), positions.ignore_index)
        every = replace(positions, share=1.0)
        keep, labels, _ = every.counted(flat, (len(batch), len(logits) // len(batch)), task.n_classes)
        self.n_positions += int(keep.sum())
        named = None if labels is None else labels[keep]
        return logits[keep.flatten()], named, position_weights(batch, keep, named, task.class_weights)

    def _with_labels(self, prepared: Batch) -> Batch:
        """The batch with its labels as the kind of outputs reads them."""
        network = self.task.network
        if prepared.labels is None:
            return prepared
        labels = network.kind.labels_of(
            prepared.labels,
            size=len(prepared),
            columns=self.task.n_classes,
            device=network.device,
            checks=self.checks,
        )
        return replace(prepared, labels=labels)

    def finish(self, *, may_be_empty: bool = False) -> Information:
        if self.count == 0 and not may_be_empty:
            raise DataError("The data are empty: expected at least one batch.")
        with plain_execution(self.task.network.device):
            self.checks.finish()
            total = self.accumulator.finish()
        likelihood = None if self.likelihood is None else float(self.likelihood)
        positions = self.task.positions
        if positions is not None and not self.n_positions and not may_be_empty:
            raise LabelError(
                f"No position of the data counts: expected some with a label other than {positions.ignore_index}, in "
                "places that the attention mask keeps."
            )
        if positions is not None and positions.head is not None and positions.share < 1:
            total = total * (1 / positions.share)
            likelihood = None if likelihood is None else likelihood / positions.share
        n_samples = self.plain + float(self.mass) if self.is_weighted else self.plain
        if n_samples == 0 and not may_be_empty:
            raise _no_weight()
        return Information(
            task=self.task,
            total=total,
            n_samples=n_samples,
            log_likelihood=likelihood,
            seen=self.seen.finish(),
        )


def collect_several(
    requests: Sequence[Request],
    data: Any,
    *,
    progress: bool,
    tick: Callable[[int], None],
    at_once: int | None = None,
) -> list[tuple[Information, float]]:
    """The information for each of several requests from one pass over the data, with the seconds that each took.

    `tick` is called for each batch, or for `at_once` samples of it, with their number, and may raise to end the pass.
    """
    stream = stream_of(data, requests[0].unpack, title=_TITLE, progress=progress)
    first = next(stream, None)
    if first is None:
        raise DataError("The data are empty: expected at least one batch.")
    # The network is looked at with as many samples as it will get: with thousands at once it is slower.
    example = next(pieces(first, at_once))
    passes, seconds = [], [0.0] * len(requests)
    for index, request in enumerate(requests):
        begin = time.perf_counter()
        _, network = request.checked()
        passes.append(_Pass(request.routed(*request.task(network, example, len(example))), Repeats()))
        seconds[index] += time.perf_counter() - begin
    for batch in chain([first], stream):
        for (index, one), part in product(enumerate(passes), pieces(batch, at_once)):
            tick(len(part))
            begin = time.perf_counter()
            one.add(part)
            seconds[index] += time.perf_counter() - begin
    results = []
    for index, one in enumerate(passes):
        begin = time.perf_counter()
        results.append((one.finish(), seconds[index] + time.perf_counter() - begin))
    return results


def _no_weight() -> DataError:
    return DataError("All weights are zero: expected at least one sample that counts.")


def require_class_weights(weights: Any, classes: int) -> tuple[float, ...] | None:
    """The weight of each class, checked; None if there are none."""
    if weights is None:
        return None
    try:
        values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    if values.shape != (classes,) or not bool((torch.isfinite(values) & (values >= 0)).all()) or not bool(values.any()):
        raise ArgumentError(
            f"class_weights are {str(weights)[:60]}; expected {classes} finite numbers of zero or more, one for each "
            "class of the model, not all of them zero."
        )
    return tuple(values.tolist())


def _sample_weights(task: Task, batch: Batch, checks: Checks) -> Float[Tensor, "B"] | None:
    """w_n of each sample of a prepared batch: its own, times that of the class of its label; None where all are one."""
    size, device = len(batch), task.network.device
    own = None if batch.weights is None else checked_weights(batch.weights, size=size, device=device, checks=checks)
    if task.class_weights is None:
        return own
    if batch.labels is None:
        raise LabelError(
            "class_weights weigh each sample by its label, and a batch has no labels; expected batches (x, labels), or "
            "weights of the samples in place of class_weights."
        )
    if task.positions is not None:
        return own  # every position has a label of its own
    labels = task.kind.labels_of(batch.labels, size=size, columns=task.n_classes, device=device, checks=checks)
    # A label out of range is reported by `checks`; it must not stop the device before that.
    by_class = torch.tensor(task.class_weights, dtype=torch.float64, device=device)
    of_labels = by_class[labels.clamp(0, task.n_classes - 1)]
    return of_labels if own is None else own * of_labels
