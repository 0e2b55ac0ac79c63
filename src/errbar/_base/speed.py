"""How fast this machine is: the time of a call, and of the operations that costs are counted in.

Nothing here is a number of some machine: products and passes over memory are tried out for a moment, once in a process
for each device and dtype.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

# The side of the matrices that are multiplied: large enough for full speed, and a matter of milliseconds.
_SIDE = {"cpu": 320, "cuda": 2048}
# Tries of each: as many as go into a moment, and some at least. A process that has to share its cores waits for one of
# its threads in most of them.
_LEAST_TRIES, _MOST_TRIES, _MOMENT = 3, 30, 0.03
# Kernels that are started one after the other, to see how long one takes.
_LAUNCHES = 100


@dataclass(frozen=True)
class MachineSpeed:
    """Seconds of a multiplication in a matrix product, of one in float64, and of a Monte Carlo draw of one class.

    `launch` are those that starting a kernel takes on a device that runs behind, whatever its size; 0 on a CPU.
    """

    product: float
    double: float
    draw: float
    launch: float = 0.0

    @staticmethod
    def of(device: torch.device, dtype: torch.dtype) -> MachineSpeed:
        """Tried out when it is first asked for, with as many threads as there are now."""
        return _tried_out(str(device), dtype, torch.get_num_threads())


def timed(run: Callable[[], Result], device: torch.device) -> tuple[Result, float]:
    """What a call returns, and its seconds until the device has finished it."""
    start = _now(device)
    result = run()
    return result, _now(device) - start


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@functools.lru_cache(maxsize=64)
def _tried_out(device_name: str, dtype: torch.dtype, threads: int) -> MachineSpeed:
    device = torch.device(device_name)
    double = _product_seconds(torch.float64, device)
    product = double if dtype == torch.float64 else _product_seconds(dtype, device)
    launch = _launch_seconds(device) if device.type == "cuda" else 0.0
    return MachineSpeed(product, double, _draw_seconds(dtype, device), launch)


def _launch_seconds(device: torch.device) -> float:
    """Seconds of one of many additions to a few numbers, which come one after the other."""
    numbers = torch.zeros(8, device=device)

    def add() -> Tensor:
        for _ in range(_LAUNCHES):
            numbers.add_(1.0)
        return numbers

    return _least_seconds(add, device) / _LAUNCHES


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    side = _SIDE.get(device.type, _SIDE["cpu"])
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return _least_seconds(lambda: matrix @ matrix, device) / side**3


def _draw_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a softmax for one draw of one class, as `GaussianSampler` takes it."""
    numbers = torch.zeros(4, 32, 1024, dtype=dtype, device=device)

    def softmax() -> Tensor:
        exponents = numbers + 1.0
        exponents -= exponents.amax(1, keepdim=True)
        exponents.exp_()
        return exponents.sum(1).reciprocal_()

    return _least_seconds(softmax, device) / numbers.numel()


def _least_seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    """The least of several, since other processes only make it longer, and the first one warms up."""
    taken: list[float] = []
    while len(taken) < _LEAST_TRIES or (len(taken) < _MOST_TRIES and sum(taken) < _MOMENT):
        taken.append(timed(run, device)[1])
    return min(taken)
