"""`plan`: what each structure would cost for the last layers, for all vectors and for all parameters.

Bytes are those of `_curvature.workload`, seconds those of `_planning.seconds`. Both follow from shapes and from the
time of a forward pass: nothing is differentiated, and nothing large is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from errbar._base.checks import Checks, require_option, whole_number
from errbar._base.execution import plain_execution
from errbar._base.memory import readable, usable_bytes
from errbar._base.speed import MachineSpeed, timed
from errbar._curvature.fisher import Fisher, fisher_form, require_fisher
from errbar._curvature.layout import Inspection, Layout, inspect
from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._curvature.mixture import described_structure, is_mixture
from errbar._curvature.registry import faithfulness, require_structure, structure_called, structure_names
from errbar._curvature.scores import require_draws
from errbar._curvature.structure import planned_cost
from errbar._curvature.task import product_dtype
from errbar._curvature.workload import Cost, Workload
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Batch, Unpack, to_batch
from errbar._model.network import Network, Output
from errbar._model.outputs import POSITIONS, require_outputs
from errbar._model.selection import Selection, listed_modules, require_one_question
from errbar._planning.mixing import mixture_that_fits, mixtures_of
from errbar._planning.seconds import Seconds, duration
from errbar.errors import ArgumentError

# Characters of the table's first column.
_LABEL = 7
# The numbers of last layers that are planned unless others are asked for.
_LAST_LAYERS = (1, 2, 4)


@dataclass(frozen=True)
class Option:
    """A structure of the posterior over some parameters, and what it costs.

    `last_layers` and `parameters` say which, as `fit` takes them; where a selection has both names, as all the layers
    of a network do, both are given. Bytes are above what is held before the fit, without the model and the data:
    `posterior_bytes` after the fit, `fit_bytes` and `predict_bytes` the peaks, with the posterior. `seconds_once` are
    the factorisation and what the first prediction makes of it, and `first_prediction_seconds` the latter alone.
    `fits` says whether both peaks are within the memory that the plan was made for. `diagonal` names the modules that
    `kron` cannot take apart and takes as `diag` does; norm layers are not among them. `predicts_by` is "logits" where
    `predict` draws from N(ĝ, P^g), and "draws" where draws of the parameters are pushed forward.
    """

    structure: str
    last_layers: int | None
    n_parameters: int
    posterior_bytes: int
    fit_bytes: int
    predict_bytes: int
    fit_seconds_per_sample: float
    seconds_once: float
    predict_seconds_per_input: float
    exact: bool
    fits: bool
    diagonal: tuple[str, ...] = ()
    parameters: str | tuple[str, ...] | None = None
    first_prediction_seconds: float = 0.0
    predicts_by: str = "logits"

    @property
    def selected(self) -> str:
        """The parameters in a word or two."""
        if self.parameters == "all" or self.last_layers is None:
            return _name_of(self.parameters)
        return str(self.last_layers)


@dataclass(frozen=True)
class Plan:
    """The options for batches of `batch` samples and `memory` bytes; print it for a table."""

    options: tuple[Option, ...]
    memory: int
    batch: int
    device: str

    @property
    def best(self) -> Option | None:
        """What `structure="auto"` would choose for all parameters, or for those that the plan is about; None if nothing
        fits."""
        most = max(option.n_parameters for option in self.options)
        return _best([option for option in self.options if option.n_parameters == most])

    def best_for(
        self, last_layers: int | None = None, *, parameters: str | Sequence[str] | None = None
    ) -> Option | None:
        """What `structure="auto"` would choose for the last r layers, for `parameters`, or else for all of them."""
        if last_layers is None and parameters is None:
            return self.best
        names = parameters if parameters is None or isinstance(parameters, str) else tuple(parameters)
        own = [
            option
            for option in self.options
            if (names is not None and option.parameters == names)
            or (last_layers is not None and option.last_layers == last_layers)
        ]
        if not own:
            asked = f"last_layers is {last_layers!r}" if names is None else f"parameters is {names!r}"
            argument = f"last_layers={last_layers!r}" if names is None else f"parameters={names!r}"
            planned = list(dict.fromkeys(option.selected for option in self.options))
            raise ArgumentError(f"{asked}; the plan is about {', '.join(planned)}. Use errbar.plan(..., {argument}).")
        return _best(own)

    def __str__(self) -> str:
        return _table(self)


def _best(options: Sequence[Option]) -> Option | None:
    return min((o for o in options if o.fits), key=lambda option: faithfulness(option.structure), default=None)


def plan(
    model: nn.Module,
    example: Any,
    memory: int | None = None,
    *,
    last_layers: int | None = None,
    parameters: str | Sequence[str] | None = None,
    structure: str | Mapping[str, str] | None = None,
    fisher: str = "ggn",
    rank: int = DEFAULT_RANK,
    precision: str | None = None,
    samples: int = 1000,
    draws: int = 1,
    unpack: Unpack | None = None,
    output: Output = None,
    outputs: str = "classes",
) -> Plan:
    """What each structure would cost for the last 1, 2 and 4 layers, for all vectors, and for all parameters.

    It takes the time of less than five forward passes of the example, and no backward pass; nothing large is made. Of
    exact structures with the same result the first is listed.

    Args:
        model: a classifier that returns logits; never modified.
        example: one batch as `collect` takes them; the fit, and predictions, are planned for batches of its size.
        memory: bytes that a fit may take; by default nine tenths of what is available.
        last_layers: plan for these parameters alone; as in `collect`.
        parameters: plan for these parameters alone; as in `collect`.
        structure: plan for this structure alone, a name or a mixture as in `collect`; of the usual parameters, those
            that a mixture divides. Without it, the mixture of "auto" is planned where neither "dense" nor "block" fits.
        fisher: as in `collect`.
        rank: as in `collect`.
        precision: as in `collect`.
        samples: Monte Carlo draws of a prediction.
        draws: as in `collect`, for `fisher="sampled"`.
        unpack: as in `collect`.
        output: as in `collect`.
        outputs: as in `collect`.
    """
    if outputs == POSITIONS:
        raise ArgumentError(
            "The cost of outputs='positions' depends on how many positions count, which no plan knows; expected "
            "outputs='classes' or 'labels'. A fit to a few inputs tells more."
        )
    kind = require_fisher(fisher)
    require_option("precision", precision, (None, "float64"))
    text = None if structure is None else require_structure(structure)
    if last_layers is not None or parameters is not None:
        require_one_question(last_layers, parameters)
    samples, directions, scores = require_samples(samples), whole_number(rank), require_draws(draws)
    if directions is None or directions < 1:
        raise ArgumentError(f"rank is {rank!r}; expected a whole number of one or more.")
    if memory is not None and (whole_number(memory) or 0) < 1:
        raise ArgumentError(f"memory is {memory!r}; expected a whole number of bytes, 1 or more.")
    subject = example if isinstance(example, Subject) else Subject(model, example, unpack, output, outputs)
    inspection, layout, size = subject.looked
    network = layout.network
    inspection.require_gauge(kind)
    limit = usable_bytes(network.device) if memory is None else int(memory)
    with plain_execution(network.device):
        dtype = product_dtype(network, precision)  # type: ignore[arg-type]
        speed = MachineSpeed.of(network.device, dtype)
    questions = _questions(inspection, last_layers, parameters)
    given = mixtures_of(structure, [question.selection for question in questions])
    if any(given):
        questions = [question for question, mixture in zip(questions, given, strict=True) if mixture]
    asked = None if text == "auto" else text
    form = fisher_form(network.kind, kind)
    request = _Request(asked, form, dtype, directions, samples, scores if kind == "sampled" else 0, limit)
    options = [option for question in questions for option in request.options(question, layout, size, speed)]
    return Plan(tuple(options), limit, size, str(network.device))


@dataclass(frozen=True, eq=False)
class Subject:
    """A network with an example: in place of the example it serves any number of plans, and is looked at once."""

    model: nn.Module
    example: Any
    unpack: Unpack | None = None
    output: Output = None
    outputs: str = "classes"

    @cached_property
    def looked(self) -> tuple[Inspection, Layout, int]:
        """What takes forward passes of the example, which may be a large part of the data; and its size."""
        network = Network(self.model, self.output, require_outputs(self.outputs), marked=False)
        with plain_execution(network.device):
            batch = network.prepare(to_batch(self.example, self.unpack), Checks(network.device))
            inspection = inspect(network, batch)  # this call refuses unsupported models
            return inspection, _timed(inspection.layout, batch), len(batch)


def _timed(layout: Layout, batch: Batch) -> Layout:
    """The layout with the time of a pass of the whole batch, now that the network is warm."""
    network = layout.network
    if network.device.type != "cuda":
        return layout.timed(network.observed(batch))
    # The device runs behind, so that the ends of calls have no time.
    _, seconds = timed(lambda: network.logits(batch), network.device)
    return replace(layout, sample_seconds=min(layout.sample_seconds, seconds / len(batch)))


@dataclass(frozen=True)
class _Question:
    """Parameters, and the names by which `fit` knows them."""

    selection: Selection
    last_layers: int | None
    parameters: str | tuple[str, ...] | None


def _questions(
    inspection: Inspection, last_layers: int | None, parameters: str | Sequence[str] | None
) -> list[_Question]:
    """What is asked for; or the last 1, 2 and 4 layers, all vectors and all parameters, each selection once."""
    layout = inspection.layout
    if last_layers is not None or parameters is not None:
        selection = inspection.selected(last_layers=last_layers, parameters=parameters)
        names = parameters if parameters is None or isinstance(parameters, str) else tuple(parameters)
        return [_Question(selection, last_layers, names)]
    every = layout.everything()
    counts = [count for count in _LAST_LAYERS if count < layout.n_layers]
    if layout.n_layers:
        counts.append(layout.n_layers)
    found = {layout.last(count): count for count in counts if count in _LAST_LAYERS or layout.last(count) == every}
    questions: dict[Selection, tuple[int | None, str | None]] = {key: (count, None) for key, count in found.items()}
    if layout.n_layers:
        vectors = layout.vectors()
        questions[vectors] = (found.get(vectors), "vectors")
    questions.pop(every, None)
    questions[every] = (found.get(every), "all")
    return [_Question(selection, count, name) for selection, (count, name) in questions.items()]


@dataclass(frozen=True)
class _Request:
    """What is planned, apart from the parameters: a structure or None for each, and the sizes of a fit."""

    structure: str | None
    fisher: Fisher
    dtype: torch.dtype
    rank: int
    samples: int
    scores: int
    limit: int

    def options(self, question: _Question, layout: Layout, size: int, speed: MachineSpeed) -> list[Option]:
        work = layout.workload(
            question.selection,
            batch=size,
            fisher=self.fisher,
            dtype=self.dtype,
            rank=self.rank,
            draws=self.samples,
            scores=self.scores,
        )
        share, alone = (
            layout.tail_share(question.selection),
            tuple(layout.without_factors(question.selection).matrices()),
        )
        options: list[Option] = []
        for name in self._names(work, layout):
            cost = planned_cost(structure_called(name), work)
            if not (cost.exact and any(option.exact for option in options)):
                seconds = Seconds.of(cost, work, share, layout.sample_seconds, speed)
                options.append(self._option(name, question, work, cost, seconds, alone if name == "kron" else ()))
        return options

    def _names(self, work: Workload, layout: Layout) -> Sequence[str]:
        """What was asked for; or all, and the mixture that fits where no exact one does."""
        if self.structure is not None:
            return (self.structure,)
        mixture = mixture_that_fits(work, layout, self.limit)
        return sorted([*structure_names(), mixture], key=faithfulness) if mixture else structure_names()

    def _option(
        self, name: str, question: _Question, work: Workload, cost: Cost, seconds: Seconds, alone: tuple[str, ...]
    ) -> Option:
        return Option(
            structure=name,
            last_layers=question.last_layers,
            n_parameters=work.n,
            posterior_bytes=cost.posterior_bytes,
            fit_bytes=cost.fit_bytes,
            predict_bytes=cost.predict_bytes,
            fit_seconds_per_sample=seconds.sample,
            seconds_once=seconds.factorise + seconds.first,
            predict_seconds_per_input=seconds.input,
            exact=cost.exact,
            fits=cost.peak_bytes <= self.limit,
            diagonal=alone,
            parameters=question.parameters,
            first_prediction_seconds=seconds.first,
            predicts_by="draws" if cost.by_draws else "logits",
        )


def _name_of(parameters: str | tuple[str, ...] | None) -> str:
    names = (parameters,) if isinstance(parameters, str) else parameters or ()
    return names[0] if len(names) == 1 and len(names[0]) <= _LABEL else "named"


# --------------------------------------------------------------------------------------------------------- the table


def _table(plan: Plan) -> str:
    """A group of rows for each selection, separated by lines; at most 100 columns."""
    headers = ("layers", "parameters", "structure", "held", "fit", "predict", "a sample", "once", "an input", "")
    rows: list[tuple[str, ...]] = [headers]
    best = plan.best
    previous = None
    for option in plan.options:
        is_new = option.selected != previous
        previous = option.selected
        rows.append(
            (
                option.selected if is_new else "",
                f"{option.n_parameters:,}" if is_new else "",
                ("mixed" if is_mixture(option.structure) else option.structure) + ("" if option.exact else " ~"),
                *(_size(size) for size in (option.posterior_bytes, option.fit_bytes, option.predict_bytes)),
                duration(option.fit_seconds_per_sample),
                duration(option.seconds_once),
                duration(option.predict_seconds_per_input) + ("*" if option.predicts_by == "draws" else " "),
                "auto" if option == best else "" if option.fits else "no",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    left = {0, 2, 9}
    table = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*_heading(plan), *table, *_legend(plan)])


def _heading(plan: Plan) -> list[str]:
    return [f"{readable(plan.memory)} on {plan.device}, batches of {plan.batch:,}; bytes held, and at peaks; seconds"]


def _legend(plan: Plan) -> list[str]:
    whole = "all parameters" if any(option.parameters == "all" for option in plan.options) else "these parameters"
    lines = [f"~ not exact; no: does not fit; auto: what structure='auto' takes for {whole}"]
    if any(option.predicts_by == "draws" for option in plan.options):
        lines.append("* predict pushes draws of the parameters forward: their number, samples=, decides")
    diagonal = max((option.diagonal for option in plan.options), key=len)
    if diagonal:
        lines.append(f"kron takes {listed_modules(diagonal)} as diag does: it cannot take them apart")
    mixtures = [option for option in plan.options if is_mixture(option.structure)]
    for structure in dict.fromkeys(option.structure for option in mixtures):
        layers = ", ".join(option.selected for option in mixtures if option.structure == structure)
        lines.append(f"mixed for {layers}: {described_structure(structure, most=1)}")
    return lines


def _size(size: float) -> str:
    """Bytes in few characters.

    >>> _size(158_420_000), _size(1_049_000_000), _size(1_164_000_000_000)
    ('151 MiB', '0.98 GiB', '1.06 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}" if size >= 1 or not size else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"
