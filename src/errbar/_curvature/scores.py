"""Labels that are drawn from the network's own PMF, for `fisher="sampled"`.

With y drawn from f(x), the score s = ∂ ln f_y/∂g = e_y − f has E s sᵀ = diag f − f fᵀ = Λ. So the mean of the outer
products of k drawn scores is an unbiased estimate of Λ of rank k, and costs k backward passes whatever the number of
classes. Of several labels each is drawn by itself: s = y − f, E s sᵀ = diag f (1 − f), with zero for one that is
missing.

A draw belongs to its sample: it follows from the seed and from a key, a hash of the sample's own numbers. Batches,
ranks, their order, checkpoints and devices do not matter, and what is forgotten is what went in. Samples that are
equal have equal draws.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from errbar._base.checks import whole_number
from errbar._base.counter import GAMMA, mixed, uniform
from errbar._model.batch import Batch, leaves
from errbar._model.outputs import CLASSES, OutputKind
from errbar.errors import ArgumentError, DataWarning

# Masks of sequences, by the names that models give them: what they leave out is padding.
_MASKS = ("attention_mask",)


# Of so many samples it is counted how many repeat: 32 MiB of keys.
_COUNTED_SAMPLES = 2**22
_NOTICEABLE_REPEATS = 0.01
# Numbers that are hashed at a time on a CPU: a dozen passes over them should find them in the cache.
_HASHED_NUMBERS = 2**16


class Repeats:
    """Counts samples that repeat, of those that one pass over the data draws labels for."""

    def __init__(self) -> None:
        self._keys: list[Int[Tensor, "B"]] = []
        self._count = 0

    def add(self, keys: Int[Tensor, "B"]) -> None:
        if self._count < _COUNTED_SAMPLES:
            self._keys.append(keys)
            self._count += len(keys)

    def tell(self) -> None:
        """Warn if more than one in a hundred repeat; on the device until then, so that nothing waits for it."""
        if not self._count:
            return
        repeated = self._count - len(torch.cat(self._keys).unique())
        if repeated > _NOTICEABLE_REPEATS * self._count:
            warnings.warn(
                f"{repeated:,} of {self._count:,} samples repeat others ({repeated / self._count:.0%}), and samples "
                "that are equal have equal draws, so these do not average out. With fisher='sampled', expected at most "
                "1 % of them; use fisher='ggn', more draws=, or data in which the samples differ.",
                DataWarning,
                stacklevel=4,
            )


@dataclass(frozen=True)
class ScoreDraws:
    """`draws` scores of each sample, from labels that follow from `seed` and the sample.

    `repeats` counts the samples that draw, where somebody wants to know; `kind` says what the logits mean.
    """

    draws: int
    seed: int
    kind: OutputKind = field(default=CLASSES, repr=False)
    repeats: Repeats | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        return self.draws

    def __call__(self, batch: Batch, logits: Float[Tensor, "B M"]) -> Float[Tensor, "k B M"]:
        """(e_y − f)/√k for each of k drawn labels: the sum of their outer products estimates Λ."""
        keys = sample_keys(batch)
        if self.repeats is not None:
            self.repeats.add(keys)
        scores = self.kind.scores(logits, self.labels(keys, logits), batch.labels)
        return scores / math.sqrt(self.draws)

    def counting(self, repeats: Repeats) -> ScoreDraws:
        """The same draws, counted."""
        return replace(self, repeats=repeats)

    def labels(self, keys: Int[Tensor, "B"], logits: Float[Tensor, "B M"]) -> Int[Tensor, "B k *L"]:
        """Labels drawn from f."""
        count = self.kind.uniforms(logits.shape[1])
        uniform = uniforms(keys, self.seed, self.draws * count)
        return self.kind.drawn(logits, uniform.unflatten(1, (self.draws, count)))


def require_draws(draws: object) -> int:
    number = whole_number(draws)
    if number is None or number < 1:
        raise ArgumentError(f"draws is {draws!r}; expected a whole number of one or more, of labels for each sample.")
    return number


def sample_keys(batch: Batch) -> Int[Tensor, "B"]:
    """A 64-bit hash of each sample of a batch: Σ mixed bits of x_i times c_i modulo 2⁶⁴, an odd c_i for each place i.

    Numbers count as float64, whatever their dtype, and zeros not at all; places that an attention mask leaves out do
    not count either, and the others are counted from the first that it keeps. So padding with zeros at the end, or
    behind a mask on either side, changes no key.
    """
    if batch.keys is not None:
        return batch.keys
    size = len(batch)
    mask = mask_of(batch)
    total: Tensor | None = None
    for index, leaf in enumerate(_padded_leaves(batch)):
        if leaf.ndim == 0 or leaf.shape[0] != size:
            continue
        key = _leaf_keys(leaf, index, mask)
        total = key if total is None else total + key
    assert total is not None, "a batch holds a tensor that runs over its samples"
    return mixed(total)


def mask_of(batch: Batch) -> Tensor | None:
    """What says which places of the sequences of a batch are padding, if anything does."""
    return next((value for name, value in batch.kwargs.items() if name in _MASKS and isinstance(value, Tensor)), None)


def uniforms(keys: Int[Tensor, "B"], seed: int, draws: int) -> Float[Tensor, "B k"]:
    """`draws` numbers in [0, 1) for each key, in float64."""
    counter = torch.arange(1, draws + 1, device=keys.device)
    start = mixed(torch.tensor([seed], dtype=torch.int64, device=keys.device))
    bits = mixed(keys[:, None] + start + counter * GAMMA)
    return uniform(bits)


def _padded_leaves(batch: Batch) -> list[Tensor]:
    return [
        pad_packed_sequence(leaf, batch_first=True)[0] if isinstance(leaf, PackedSequence) else leaf
        for leaf in leaves((batch.args, batch.kwargs))
    ]


def places_in(mask: Tensor) -> Int[Tensor, "B T"]:
    """1 for the first place of each sequence that a mask keeps, 2 for the next, wherever the padding is."""
    return (mask != 0).cumsum(1)


def _leaf_keys(leaf: Tensor, index: int, mask: Tensor | None) -> Int[Tensor, "B"]:
    keep = order = None
    if mask is not None and leaf.shape[: mask.ndim] == mask.shape:
        keep = (mask != 0).reshape(*mask.shape, *[1] * (leaf.ndim - mask.ndim))
        order = places_in(mask) if mask.ndim == 2 else None
    places = _places(leaf, index)
    numbers = leaf[0].numel() if len(leaf) else 1
    step = max(1, _HASHED_NUMBERS // max(1, numbers)) if leaf.device.type == "cpu" else max(1, len(leaf))
    keys = []
    for start in range(0, max(1, len(leaf)), step):
        rows = slice(start, start + step)
        # Adding 0.0 makes of −0.0 a zero with no bits.
        bits = mixed((leaf[rows].detach().double() + 0.0).view(torch.int64))
        if keep is not None:
            bits = torch.where(keep[rows], bits, 0)
        products = bits * (places if order is None else _places(leaf, index, order[rows]))
        keys.append(products.flatten(1).sum(1) if products.ndim > 1 else products)
    return torch.cat(keys)


def _places(leaf: Tensor, index: int, first: Int[Tensor, "b T"] | None = None) -> Int[Tensor, "*b *T"]:
    """c_i of each place of a sample: it is known by its coordinates, not by how many others there are, so padding
    moves no number. `first` are the first coordinates of each sample, where these differ."""
    place = torch.tensor(index + 1, dtype=torch.int64, device=leaf.device) * GAMMA
    if first is not None:
        place = mixed(place + first * GAMMA)
    for dimension in range(1 if first is None else 2, leaf.ndim):
        coordinate = torch.arange(1, leaf.shape[dimension] + 1, device=leaf.device)
        place = mixed(place[..., None] + coordinate * GAMMA)
    return place | 1
