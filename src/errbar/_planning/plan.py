"""`plan`: what each structure and each number of layers would cost, before anything large is allocated.

Bytes are those of `_curvature.workload`. Seconds are multiplications over the speed of matrix products, which is tried
out for a moment, plus forward and backward passes of the network as one of them takes for the example.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from errbar._base.checks import Checks, require_option, whole_number
from errbar._base.execution import plain_execution
from errbar._base.memory import readable, usable_bytes
from errbar._curvature.fisher import require_fisher
from errbar._curvature.layout import Layout, inspect
from errbar._curvature.lowrank import DEFAULT_RANK
from errbar._curvature.mixture import described_structure, is_mixture
from errbar._curvature.registry import faithfulness, structure_called, structure_names
from errbar._curvature.scores import require_draws
from errbar._curvature.structure import planned_cost
from errbar._curvature.task import product_dtype
from errbar._curvature.workload import Cost, Workload
from errbar._distributions.sampling import require_samples
from errbar._model.batch import Batch, Unpack, to_batch
from errbar._model.network import Network, Output
from errbar._model.selection import Selection, listed_modules
from errbar._planning.mixing import mixture_that_fits, mixtures_of
from errbar.errors import ArgumentError

# Samples of the example that are run, and how long the speed of a product is measured.
_FEW = 16
_PROBE_SECONDS = 0.04
_PROBE_SIZE = {"cpu": 320, "cuda": 4096}
_QUICK, _MORE = 1e-3, 256
# Rows of the printed table.
_ROWS_SHOWN = 20


@dataclass(frozen=True)
class Option:
    """A structure of the posterior over the last layers, and what it costs.

    `last_layers` is None for all parameters. Bytes are above what is held before the fit, without the model and the
    data: `posterior_bytes` after the fit, `fit_bytes` and `predict_bytes` the peaks, with the posterior. `seconds_once`
    are the factorisation, and what the first prediction makes of it. `fits` says whether both peaks are within the
    memory that the plan was made for. `diagonal` names the modules that `kron` cannot take apart and takes as `diag`
    does; norm layers are not among them.
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


@dataclass(frozen=True)
class Plan:
    """The options for batches of `batch` samples and `memory` bytes; print it for a table."""

    options: tuple[Option, ...]
    memory: int
    batch: int
    device: str

    @property
    def best(self) -> Option | None:
        """What `structure="auto"` would choose for all parameters; None if nothing fits."""
        return self.best_for(None)

    def best_for(self, last_layers: int | None) -> Option | None:
        """What `structure="auto"` would choose for the last r layers, or with None for all parameters."""
        counts = {option.last_layers for option in self.options}
        if last_layers is None and None not in counts:
            last_layers = max(count for count in counts if count is not None)
        if last_layers not in counts:
            most = max(count for count in counts if count is not None)
            raise ArgumentError(f"last_layers is {last_layers!r}; expected 1 to {most}, or None for all parameters.")
        own = [option for option in self.options if option.last_layers == last_layers and option.fits]
        return min(own, key=lambda option: faithfulness(option.structure), default=None)

    def __str__(self) -> str:
        return _table(self)


def plan(
    model: nn.Module,
    example: Any,
    memory: int | None = None,
    *,
    fisher: str = "ggn",
    rank: int = DEFAULT_RANK,
    precision: str | None = None,
    samples: int = 1000,
    draws: int = 1,
    structure: str | Mapping[str, str] | None = None,
    unpack: Unpack | None = None,
    output: Output = None,
) -> Plan:
    """What each structure would cost for the last r = 1, 2, … layers and for all parameters.

    A few samples pass through the network, and matrix products run for a fraction of a second; nothing large is made.

    Args:
        model: a classifier that returns logits; never modified.
        example: one batch as `collect` takes them; the fit, and predictions, are planned for batches of its size.
        memory: bytes that a fit may take; by default nine tenths of what is available.
        fisher: as in `collect`.
        rank: as in `collect`.
        precision: as in `collect`.
        samples: Monte Carlo draws of a prediction.
        draws: as in `collect`, for `fisher="sampled"`.
        structure: a mixture, as in `collect`, to be planned beside the others for the layers that it names. Without it,
            the mixture that `structure="auto"` would take is planned where neither "dense" nor "block" fits.
        unpack: as in `collect`.
        output: as in `collect`.
    """
    kind = require_fisher(fisher)
    require_option("precision", precision, (None, "float64"))
    samples, directions, scores = require_samples(samples), whole_number(rank), require_draws(draws)
    if directions is None or directions < 1:
        raise ArgumentError(f"rank is {rank!r}; expected a whole number of one or more.")
    network = Network(model, output)
    limit = usable_bytes(network.device) if memory is None else whole_number(memory)
    if limit is None or limit < 1:
        raise ArgumentError(f"memory is {memory!r}; expected a whole number of bytes, 1 or more.")
    with plain_execution(network.device):
        batch = network.prepare(to_batch(example, unpack), Checks(network.device))
        few = batch.rows(0, _FEW)
        inspection = inspect(network, few)  # this call refuses unsupported models
        inspection.require_gauge(kind)
        layout = inspection.layout.timed(network.observed(few))
        dtype = product_dtype(network, precision)  # type: ignore[arg-type]
        speed = _Speed.of(network, batch, dtype)
    options = []
    selections = _selections(layout)
    mixtures = mixtures_of(structure, [selection for _, selection in selections])
    for (last_layers, selection), given in zip(selections, mixtures, strict=True):
        sizes: dict[str, Any] = {"batch": len(batch), "fisher": kind, "dtype": dtype, "rank": directions}
        work = layout.workload(selection, **sizes, draws=samples, scores=scores if kind == "sampled" else 0)
        share = layout.tail_share(selection)
        alone = tuple(layout.alone(selection).matrices())
        mixture = given or mixture_that_fits(work, layout, limit)
        names = sorted([*structure_names(), mixture], key=faithfulness) if mixture else structure_names()
        options += [_option(name, last_layers, work, share, speed, limit, alone) for name in names]
    return Plan(tuple(options), limit, len(batch), str(network.device))


def _selections(layout: Layout) -> list[tuple[int | None, Selection]]:
    """The last 1, 2, … layers, and all parameters; the latter as None, also where the last r are all."""
    every = layout.everything()
    selections: list[tuple[int | None, Selection]] = [(r, layout.last(r)) for r in range(1, layout.n_layers + 1)]
    return [*selections, (None, every)] if not selections or selections[-1][1] != every else selections


def _option(
    structure: str,
    last_layers: int | None,
    work: Workload,
    share: float,
    speed: _Speed,
    limit: int,
    alone: tuple[str, ...],
) -> Option:
    cost = planned_cost(structure_called(structure), work)
    fit, once, predict = speed.seconds(cost, work, share)
    return Option(
        structure=structure,
        last_layers=last_layers,
        n_parameters=work.n,
        posterior_bytes=cost.posterior_bytes,
        fit_bytes=cost.fit_bytes,
        predict_bytes=cost.predict_bytes,
        fit_seconds_per_sample=fit,
        seconds_once=once,
        predict_seconds_per_input=predict,
        exact=cost.exact,
        fits=cost.peak_bytes <= limit,
        diagonal=alone if structure == "kron" else (),
    )


@dataclass(frozen=True)
class _Speed:
    """Seconds of a multiplication in the dtype of products and in float64, of a draw of one class, and of passes of one
    sample forward and backward."""

    product: float
    double: float
    draw: float
    forward: float
    backward: float

    @staticmethod
    def of(network: Network, batch: Batch, dtype: torch.dtype) -> _Speed:
        few = batch.rows(0, _FEW)
        # A pass of a small network is so quick that more samples hardly take longer.
        if _least_seconds(lambda: network.logits(few), network.device) < _QUICK:
            few = batch.rows(0, _MORE)
        forward, backward = _passes(network, few)
        double = _product_seconds(torch.float64, network.device)
        product = double if dtype == torch.float64 else _product_seconds(dtype, network.device)
        return _Speed(product, double, _draw_seconds(network), forward / len(few), backward / len(few))

    def seconds(self, cost: Cost, work: Workload, share: float) -> tuple[float, float, float]:
        """Of the fit for a sample, once, and of a prediction for an input; `share` of the network is differentiated."""
        passes = [self.forward + seeds * share * self.backward for seeds in cost.seeds]
        draws = work.draws * work.classes * self.draw
        fit = passes[0] + cost.sample_products * self.product
        predict = passes[1] + cost.input_products * self.product + draws
        return fit, cost.once_products * self.double, predict


def _passes(network: Network, few: Batch) -> tuple[float, float]:
    """Seconds of one pass forward, and of one backward to all parameters."""
    forward = _least_seconds(lambda: network.logits(few), network.device)
    parameters = {name: value for name, value in network.module.named_parameters() if value.is_floating_point()}
    values = {name: value.detach().requires_grad_() for name, value in parameters.items()}
    with torch.enable_grad():
        logits = network.logits(few, values)
        if not logits.requires_grad:
            return forward, forward

        def back() -> Any:
            return torch.autograd.grad(logits.sum(), list(values.values()), retain_graph=True, allow_unused=True)

        return forward, _least_seconds(back, network.device)


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    size = _PROBE_SIZE.get(device.type, 320)
    first = torch.ones(size, size, dtype=dtype, device=device)
    return _least_seconds(lambda: first @ first, device) / size**3


def _draw_seconds(network: Network) -> float:
    """Seconds of a softmax for one draw of one class, as `GaussianSampler` takes it."""
    numbers: Tensor = torch.zeros(8, 32, 1024, dtype=network.dtype, device=network.device)

    def softmax() -> Tensor:
        exponents = numbers + 1.0
        exponents -= exponents.amax(1, keepdim=True)
        exponents.exp_()
        return exponents.sum(1).reciprocal_()

    return _least_seconds(softmax, network.device) / numbers.numel()


def _least_seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call: the least of several, since other processes only make it longer; the first warms up."""

    def finished() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begin, least = finished(), float("inf")
    for count in range(100):
        start = finished()
        run()
        end = finished()
        least = min(least, end - start)
        if count and end - begin > _PROBE_SECONDS:
            break
    return least


# --------------------------------------------------------------------------------------------------------- the table


def _table(plan: Plan) -> str:
    """At most about twenty rows: of deep networks the last 1, 2, 3, 5, 8, … layers, and all."""
    counts = list(dict.fromkeys(option.last_layers for option in plan.options))
    visible = _thinned(counts, _ROWS_SHOWN // len(structure_names()))
    headers = ("layers", "structure", "parameters", "posterior", "fit", "predict", "a sample", "once", "an input")
    rows: list[tuple[str, ...]] = [headers]
    notes = [""]
    best = plan.best
    for option in plan.options:
        if option.last_layers in visible:
            rows.append(
                (
                    "all" if option.last_layers is None else str(option.last_layers),
                    ("mixed" if is_mixture(option.structure) else option.structure) + ("" if option.exact else " ~"),
                    f"{option.n_parameters:,}",
                    *(_size(size) for size in (option.posterior_bytes, option.fit_bytes, option.predict_bytes)),
                    _duration(option.fit_seconds_per_sample),
                    _duration(option.seconds_once),
                    _duration(option.predict_seconds_per_input),
                )
            )
            notes.append("" if option.fits else "no")
            if option == best:
                notes[-1] = "auto"
    widths = [max(len(row[i]) for row in rows) for i in range(len(headers))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    first = (
        f"{readable(plan.memory)} on {plan.device}, batches of {plan.batch:,}; bytes held, and at the peaks; seconds"
    )
    last = "~ not exact; no: does not fit; auto: what structure='auto' takes for all parameters"
    diagonal = max((option.diagonal for option in plan.options), key=len)
    remarks = [f"kron takes {listed_modules(diagonal)} as diag does: it cannot take them apart"] if diagonal else []
    mixtures = [option for option in plan.options if option.last_layers in visible and is_mixture(option.structure)]
    for structure in dict.fromkeys(option.structure for option in mixtures):
        counts = [option.last_layers for option in mixtures if option.structure == structure]
        layers = ", ".join("all" if count is None else str(count) for count in counts)
        remarks.append(f"mixed for {layers}: {described_structure(structure, most=1)}")
    table = (f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True))
    return "\n".join([first, *table, last, *remarks])


def _thinned(counts: list[int | None], most: int) -> list[int | None]:
    """All counts if they are few, else 1, 2, 3, 5, 8, … and the last: as many as fit."""
    if len(counts) <= most:
        return counts
    sparse: list[int | None] = []
    first, second = 1, 2
    while first in counts[:-1] and len(sparse) < most - 1:
        sparse.append(first)
        first, second = second, first + second
    return [*sparse, counts[-1]]


def _size(size: float) -> str:
    """Bytes in few characters.

    >>> _size(158_420_000), _size(1_164_000_000_000)
    ('151 MiB', '1.06 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.3g} TiB"


def _duration(seconds: float) -> str:
    """Seconds in few characters.

    >>> _duration(270_000), _duration(0.00785)
    ('75 h', '7.85 ms')
    """
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"
