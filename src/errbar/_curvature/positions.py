"""What counts of inputs with many positions, and how: Σ_n Σ_t J_ntᵀ Λ_nt J_nt.

A position without a label (`ignore_index`), where labels are given, and one that an attention mask leaves out add
nothing. With `share` < 1 only that share of the others is taken, each with the weight 1/share, so that the sum stays
unbiased; which ones follows from the seed and a hash of the input, so that what is forgotten is what went in.

Scores of positions are drawn independently and have mean zero, so for the parameters behind several positions
    E (Σ_t J_tᵀ s_t)(Σ_t J_tᵀ s_t)ᵀ = Σ_t J_tᵀ Λ_t J_t:
one backward pass per draw gives an unbiased estimate, however many positions there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar._base.counter import GAMMA, mixed, uniform
from errbar._curvature.scores import ScoreDraws, mask_of, places_in, sample_keys
from errbar._model.batch import Batch
from errbar._model.positions import IGNORE_INDEX, HeadNetwork, masked_in, position_labels
from errbar.errors import ArgumentError, LabelError

# The numbers that choose positions are others than those that draw labels.
_CHOOSING = 0x5E1EC7


@dataclass(frozen=True)
class Positions:
    """How positions are counted, of a network whose layer `head` returns the logits and is all that is selected.

    Without a `head`, parameters further back are selected.
    """

    head: str | None
    share: float = 1.0
    seed: int = 0
    ignore_index: int = IGNORE_INDEX

    def counted(
        self, batch: Batch, leading: tuple[int, ...], classes: int
    ) -> tuple[Bool[Tensor, "B *S"], Int[Tensor, "B *S"] | None, Int[Tensor, "B *S"]]:
        """Which positions count, the labels of all of them if there are any, and a key for each."""
        device = batch.tensors()[0].device
        keys = position_keys(batch, leading)
        keep = torch.ones(leading, dtype=torch.bool, device=device)
        mask = masked_in(batch, leading, mask_of(batch))
        if mask is not None:
            keep &= mask.to(device)
        labels = None
        if batch.labels is not None:
            labels = position_labels(batch.labels, leading, classes, self.ignore_index, device)
            keep &= labels != self.ignore_index
        if self.share < 1:
            start = mixed(torch.tensor([self.seed ^ _CHOOSING], dtype=torch.int64, device=device))
            keep &= uniform(mixed(keys + start)) < self.share
        return keep, labels, keys

    def rows(
        self, network: HeadNetwork, batch: Batch, classes: int, class_weights: tuple[float, ...] | None = None
    ) -> Batch:
        """The positions that count of a prepared batch of the whole network, each as an input of its own."""
        rows, leading = network.rows(batch)
        keep, labels, keys = self.counted(batch, leading, classes)
        named = None if labels is None else labels[keep]
        return Batch(
            (rows.args[0][keep.flatten()],),
            labels=named,
            weights=position_weights(batch, keep, named, class_weights),
            keys=keys[keep],
        )


def position_weights(
    batch: Batch,
    keep: Bool[Tensor, "B *S"],
    labels: Int[Tensor, "R"] | None,
    class_weights: tuple[float, ...] | None,
) -> Float[Tensor, "R"] | None:
    """w of each position that counts: that of its input, times that of the class of its label; None where all are
    one."""
    own = None if batch.weights is None else batch.weights[keep.nonzero()[:, 0]]
    if class_weights is None or labels is None:
        return own
    of_labels = torch.tensor(class_weights, dtype=torch.float64, device=labels.device)[labels]
    return of_labels if own is None else own * of_labels


@dataclass(frozen=True)
class PositionScores(ScoreDraws):
    """Scores of all positions that count, put together: Σ_t J_tᵀ s_t is one combination of the logits of an input."""

    classes: int = 2
    positions: Positions = Positions(None)
    class_weights: tuple[float, ...] | None = None

    def __call__(self, batch: Batch, logits: Float[Tensor, "B SM"]) -> Float[Tensor, "k B SM"]:
        if self.repeats is not None:
            self.repeats.add(sample_keys(batch))
        flat = logits.reshape(-1, self.classes)
        leading = (len(logits), len(flat) // len(logits))
        keep, labels, keys = self.positions.counted(batch, leading, self.classes)
        scores = self.kind.scores(flat, self.labels(keys.flatten(), flat), None)
        factors = keep.double()
        if self.class_weights is not None and labels is not None:
            # A score times √w is worth w: the weights of inputs come later, those of labels are known here alone.
            own = torch.tensor(self.class_weights, dtype=torch.float64, device=labels.device)[labels[keep]]
            factors[keep] = own.sqrt()
        scores = scores * factors.flatten()[None, :, None] / math.sqrt(self.draws * self.positions.share)
        return scores.reshape(self.draws, *logits.shape)


def scores_of_positions(
    scores: ScoreDraws | None,
    positions: Positions | None,
    classes: int,
    class_weights: tuple[float, ...] | None,
) -> ScoreDraws | None:
    """The draws of a network whose positions count so: of each input together where parameters are further back."""
    if scores is None or positions is None or positions.head is not None:
        return scores
    return PositionScores(
        scores.draws, scores.seed, scores.kind, classes=classes, positions=positions, class_weights=class_weights
    )


def position_keys(batch: Batch, leading: tuple[int, ...]) -> Int[Tensor, "B *S"]:
    """A 64-bit key for each position, from that of the input and the coordinates of the position."""
    keys = sample_keys(batch)
    mask = masked_in(batch, leading, mask_of(batch))
    if mask is not None and mask.ndim == 2:
        index = places_in(mask.to(keys.device))
    else:
        index = torch.arange(1, math.prod(leading[1:]) + 1, device=keys.device)
    return mixed(keys[:, None] + index * GAMMA).reshape(leading)


def require_share(share: object) -> float:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ArgumentError(
            f"positions is {share!r}; expected the share of the positions to count, above 0 and up to 1: 0.1 for a "
            "tenth of them."
        )
    return float(share)


def batch_shape(labels: Any) -> tuple[int, ...]:
    return tuple(torch.as_tensor(labels).shape)


def with_flat_labels(batch: Batch, classes: int, positions: Positions) -> Batch:
    """The batch with its labels as a checked tensor (B, S), of which its parts take their rows."""
    if batch.labels is None:
        return batch
    try:
        labels = torch.as_tensor(batch.labels)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(batch.labels).__name__
        raise LabelError(f"Labels are {kind}; expected class numbers of all positions.") from error
    if labels.ndim < 2 or len(labels) != len(batch):
        raise LabelError(
            f"Labels have shape {tuple(labels.shape)} for a batch of {len(batch)}; expected one class number for each "
            f"position of each input, or {positions.ignore_index} where there is none."
        )
    flat, device = labels.flatten(1), batch.tensors()[0].device
    leading = tuple(flat.shape)
    return replace(batch, labels=position_labels(flat, leading, classes, positions.ignore_index, device))
