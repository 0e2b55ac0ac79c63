"""Labels that are drawn from the network's own PMF, for `fisher="sampled"`.

With y drawn from f(x), the score s = ∂ ln f_y/∂g = e_y − f has E s sᵀ = diag f − f fᵀ = Λ. So the mean of the outer
products of k drawn scores is an unbiased estimate of Λ of rank k, and costs k backward passes whatever the number of
classes.

A draw belongs to its sample: it follows from the seed and from a key, a hash of the sample's own numbers. Batches,
ranks, their order, checkpoints and devices do not matter, and what is forgotten is what went in. Samples that are
equal have equal draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from errbar._base.checks import whole_number
from errbar._model.batch import Batch, leaves
from errbar.errors import ArgumentError

# Constants of the finaliser of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit integers.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
# Masks of sequences, by the names that models give them: what they leave out is padding.
_MASKS = ("attention_mask",)


@dataclass(frozen=True)
class ScoreDraws:
    """`draws` scores of each sample, from labels that follow from `seed` and the sample."""

    draws: int
    seed: int

    @property
    def count(self) -> int:
        return self.draws

    def __call__(self, batch: Batch, logits: Float[Tensor, "B M"]) -> Float[Tensor, "k B M"]:
        """(e_y − f)/√k for each of k drawn labels: the sum of their outer products estimates Λ."""
        labels = self.labels(sample_keys(batch), logits)
        probability = torch.softmax(logits.double(), 1)
        scores = -probability.repeat(self.draws, 1, 1)
        scores.scatter_add_(2, labels.T[..., None], torch.ones_like(scores[..., :1]))
        return scores / math.sqrt(self.draws)

    def labels(self, keys: Int[Tensor, "B"], logits: Float[Tensor, "B M"]) -> Int[Tensor, "B k"]:
        """Labels drawn from softmax(g) by the inverse of its distribution function."""
        cumulative = torch.softmax(logits.double(), 1).cumsum(1)
        uniform = uniforms(keys, self.seed, self.draws)
        labels = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
        return labels.clamp_max(logits.shape[1] - 1)


def require_draws(draws: object) -> int:
    number = whole_number(draws)
    if number is None or number < 1:
        raise ArgumentError(f"draws is {draws!r}; expected a whole number of one or more, of labels for each sample.")
    return number


def sample_keys(batch: Batch) -> Int[Tensor, "B"]:
    """A 64-bit hash of each sample of a batch: Σ mixed bits of x_i times c_i modulo 2⁶⁴, an odd c_i for each place i.

    Numbers count as float64, whatever their dtype, and zeros not at all; places that an attention mask leaves out do
    not count either. So padding with zeros, or behind a mask, changes no key.
    """
    size = len(batch)
    mask = next((value for name, value in batch.kwargs.items() if name in _MASKS and isinstance(value, Tensor)), None)
    total: Tensor | None = None
    for index, leaf in enumerate(_padded_leaves(batch)):
        if leaf.ndim == 0 or leaf.shape[0] != size:
            continue
        key = _leaf_keys(leaf, index, mask)
        total = key if total is None else total + key
    assert total is not None, "a batch holds a tensor that runs over its samples"
    return _mixed(total)


def uniforms(keys: Int[Tensor, "B"], seed: int, draws: int) -> Float[Tensor, "B k"]:
    """`draws` numbers in [0, 1) for each key, in float64."""
    counter = torch.arange(1, draws + 1, device=keys.device)
    start = _mixed(torch.tensor([seed], dtype=torch.int64, device=keys.device))
    bits = _mixed(keys[:, None] + start + counter * _GAMMA)
    return _shifted(bits, 11).double() * 2.0**-53


def _padded_leaves(batch: Batch) -> list[Tensor]:
    return [
        pad_packed_sequence(leaf, batch_first=True)[0] if isinstance(leaf, PackedSequence) else leaf
        for leaf in leaves((batch.args, batch.kwargs))
    ]


def _leaf_keys(leaf: Tensor, index: int, mask: Tensor | None) -> Int[Tensor, "B"]:
    # Adding 0.0 makes of −0.0 a zero with no bits.
    bits = _mixed((leaf.detach().double() + 0.0).view(torch.int64))
    if mask is not None and mask is not leaf and leaf.shape[: mask.ndim] == mask.shape:
        keep = (mask != 0).reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        bits = torch.where(keep, bits, 0)
    # A place is known by its coordinates, not by how many others there are: padding moves no number.
    place = torch.tensor(index + 1, dtype=torch.int64, device=leaf.device) * _SECOND
    for dimension in range(1, bits.ndim):
        coordinate = torch.arange(1, bits.shape[dimension] + 1, device=bits.device)
        place = _mixed(place[..., None] + coordinate * _GAMMA)
    return (bits * (place | 1)).flatten(1).sum(1) if bits.ndim > 1 else bits * (place | 1)


def _mixed(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the argument, and 0 stays 0."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Int[Tensor, "*n"], count: int) -> Int[Tensor, "*n"]:
    """A shift to the right that brings in zeros, whatever the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
