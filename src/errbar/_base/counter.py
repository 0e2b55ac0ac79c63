"""Random numbers that are functions of a counter: the same on every device, in any order and any number at a time.

Bits come from the finaliser of splitmix64 (Steele, Lea and Flood, 2014), in which every bit of the result depends on
every bit of the argument, applied to multiples of its odd constant.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

# The constants of splitmix64, as signed 64-bit integers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
# Numbers that are drawn at a time on a CPU: what a dozen passes make of them should stay in the cache.
_DRAWN_NUMBERS = 2**15


def mixed(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The finaliser of splitmix64; 0 stays 0."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def uniform(bits: Int[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Numbers in [0, 1), in float64, from the upper 53 bits."""
    return _shifted(bits, 11).double() * 2.0**-53


def normal_row(seed: int, row: int, n: int, device: torch.device) -> Float[Tensor, "n"]:
    """n standard normal numbers in float64 (Box and Muller, 1958), which follow from the seed and the row's number."""
    half = (n + 1) // 2
    stream = torch.tensor([seed, row + 1], device=device) * torch.tensor([GAMMA, _SECOND], device=device)
    start = mixed(mixed(stream[0] + GAMMA) + stream[1])

    def uniforms(first: int, last: int) -> Float[Tensor, "k"]:
        return uniform(mixed(start + torch.arange(first + 1, last + 1, device=device) * GAMMA))

    numbers = torch.empty(2 * half, dtype=torch.float64, device=device)
    step = _DRAWN_NUMBERS if device.type == "cpu" else max(1, half)
    for first in range(0, half, step):
        last = min(first + step, half)
        # 1 − u lies in (0, 1], so its logarithm is finite.
        radius = (-2 * (1 - uniforms(first, last)).log()).sqrt()
        angle = 2 * math.pi * uniforms(half + first, half + last)
        numbers[first:last] = radius * angle.cos()
        numbers[half + first : half + last] = radius * angle.sin()
    return numbers[:n]


def _shifted(bits: Int[Tensor, "*n"], count: int) -> Int[Tensor, "*n"]:
    """A shift to the right that brings in zeros, whatever the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
