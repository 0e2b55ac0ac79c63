"""Seconds of a fit and of predictions, from the time of a forward pass and the speed of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from errbar._base.speed import MachineSpeed
from errbar._curvature.workload import BACKWARD_PASSES, Cost, Workload, by_device

# What Python takes for a batch, apart from all that is computed.
_BATCH_SECONDS = {"cpu": 1e-3, "cuda": 1.3e-3}
# A call of a module starts so many kernels, with what Python does around them. Where a pass through the network takes
# no longer than that, its time does not depend on the batch. A pass that is traced then takes so many passes more, its
# backward pass as many again, and each seed but the first this share of a backward pass. From fits of four networks on
# an H200 (`bench/results/plan-gpu.json`).
_CALL_LAUNCHES, _TRACING_PASSES, _FURTHER_SEEDS = 6, 3.0, 0.4
# A number of a sample is hashed in the time of so many draws of a class; for what was seen only some of them are.
_HASHED_DRAWS, _SEEN_NUMBERS = 6, 1024


@dataclass(frozen=True)
class Seconds:
    """Of a sample in the fit, of the factorisation, of what the first prediction adds, and of an input in each."""

    sample: float
    factorise: float
    first: float
    input: float

    @staticmethod
    def of(cost: Cost, work: Workload, share: float, forward: float, speed: MachineSpeed) -> Seconds:
        """`forward` are the seconds of a forward pass of one sample; `share` of it is differentiated."""
        backward = share * BACKWARD_PASSES * forward
        is_behind = work.device == "cuda"
        started = min(work.batch * forward, _CALL_LAUNCHES * work.calls * speed.launch) if is_behind else 0.0
        bound = started / (work.batch * forward) if started else 0.0
        first = min(cost.seeds[0], 1.0)
        further = (cost.seeds[0] - first) * (1 - (1 - _FURTHER_SEEDS) * bound)
        tracing = _TRACING_PASSES * started * (1 + first) / work.batch
        draws = work.draws * work.classes * speed.draw
        hashed = min(work.inputs, _SEEN_NUMBERS) + (work.inputs if work.scores else 0)
        own = by_device(_BATCH_SECONDS, work.device) / work.batch
        return Seconds(
            sample=own
            + _HASHED_DRAWS * hashed * speed.draw
            + forward
            + tracing
            + (first + further) * backward
            + cost.sample_products * speed.product,
            factorise=(cost.once_products - cost.first_products) * speed.double,
            first=cost.first_products * speed.double,
            input=own + forward + cost.seeds[1] * backward + cost.input_products * speed.product + draws,
        )


def duration(seconds: float) -> str:
    """Seconds in few characters.

    >>> duration(270_000), duration(0.00785)
    ('75 h', '7.85 ms')
    """
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 999.5 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"
