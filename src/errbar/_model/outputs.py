"""What the outputs of a network mean: `outputs="classes"`, `"labels"` or `"positions"`.

    kind       logits    labels           f               Λ = −∂² ln p(y|g)/∂g²    a common shift of the logits
    classes    (B, M)    (B,)             softmax g       diag f − f fᵀ            changes nothing
    labels     (B, L)    (B, L), 0/1/−1   σ(g_l), each    diag f (1 − f)           changes everything

A kind says how it reads what a model returns and the labels, and what its likelihood is: f, ln f of given labels, and
labels drawn from f as scores ∂ ln f_y/∂g. Λ is written out in `_curvature.fisher`, where `has_gauge` and
`is_diagonal` decide on its form. A new kind is one class here and one entry of `KINDS`.

A missing label is −1. It adds nothing to the likelihood, so nothing to the information: where labels are given,
Λ_ll = 0 for those that are missing. Without labels, every one counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar._base.checks import Checks
from errbar._model.batch import checked_labels, labels_as_tensor
from errbar.errors import ArgumentError, LabelError, ModelError

MISSING = -1
# Tokens and pixels: many classifications of one input (`_model.positions`).
POSITIONS = "positions"


class OutputKind(ABC):
    """One meaning of the outputs: see the top of this file. Kinds are compared by their names."""

    name: ClassVar[str]
    # Whether a common shift of all logits changes nothing, so that only their contrasts mean anything.
    has_gauge: ClassVar[bool]
    # Whether Λ is diagonal, so that "ggn" and "eta" are the same.
    is_diagonal: ClassVar[bool]
    # What a column of the logits is.
    noun: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputKind) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @abstractmethod
    def logits_of(self, value: Tensor, size: int) -> Float[Tensor, "B M"]:
        """The logits in the tensor that a model returned for `size` samples; `ModelError` for another shape."""

    @abstractmethod
    def labels_of(
        self, labels: Any, *, size: int, columns: int, device: torch.device, checks: Checks | None = None
    ) -> Int[Tensor, "B *L"]:
        """The user's labels as whole numbers on `device`; `LabelError` for any others."""

    @abstractmethod
    def counted(self, labels: Int[Tensor, "B *L"] | None) -> Bool[Tensor, "B M"] | None:
        """Which of the logits count, for labels that were read; None if all of them do."""

    @abstractmethod
    def probability(self, logits: Float[Tensor, "B M *K"]) -> Float[Tensor, "B M *K"]:
        """f."""

    @abstractmethod
    def entropy(self, logits: Float[Tensor, "B M"]) -> Float[Tensor, "B k"]:
        """The entropy of each decision of an input in nats: one, or one for each label."""

    @abstractmethod
    def decision(self, numbers: Float[Tensor, "B M"], *, are_logits: bool) -> Int[Tensor, "B k"]:
        """The most probable outcome of each decision of an input, by logits or by probabilities."""

    @abstractmethod
    def log_likelihood(self, logits: Float[Tensor, "B M"], labels: Int[Tensor, "B *L"]) -> Float[Tensor, "B"]:
        """ln f of the labels that are given, in float64; labels out of range must not stop the device."""

    @abstractmethod
    def uniforms(self, columns: int) -> int:
        """How many uniform numbers one draw of the labels of a sample takes."""

    @abstractmethod
    def drawn(self, logits: Float[Tensor, "B M"], uniform: Float[Tensor, "B k u"]) -> Int[Tensor, "B k *L"]:
        """k labels of each sample, drawn from f by numbers that are uniform in [0, 1)."""

    @abstractmethod
    def scores(
        self, logits: Float[Tensor, "B M"], drawn: Int[Tensor, "B k *L"], labels: Int[Tensor, "B *L"] | None
    ) -> Float[Tensor, "k B M"]:
        """∂ ln f_y/∂g in float64, of k drawn labels y; zero for logits that do not count by the labels of the data."""


class _Classes(OutputKind):
    """One of M classes."""

    name = "classes"
    has_gauge = True
    is_diagonal = False
    noun = "classes"

    def logits_of(self, value: Tensor, size: int) -> Float[Tensor, "B M"]:
        """One logit g is read as the pair (0, g)."""
        if not _is_table(value, size):
            raise ModelError(
                f"The model returned a {value.dtype} tensor of shape {tuple(value.shape)} for a batch of {size}; "
                f"expected floating-point logits of shape ({size}, classes){_or_positions(value, size)}."
            )
        return torch.cat([torch.zeros_like(value), value], 1) if value.shape[1] == 1 else value

    def labels_of(
        self, labels: Any, *, size: int, columns: int, device: torch.device, checks: Checks | None = None
    ) -> Int[Tensor, "B"]:
        return checked_labels(labels, size=size, classes=columns, device=device, checks=checks)

    def counted(self, labels: Int[Tensor, "B"] | None) -> None:
        return None

    def probability(self, logits: Float[Tensor, "B M *K"]) -> Float[Tensor, "B M *K"]:
        return torch.softmax(logits, 1)

    def entropy(self, logits: Float[Tensor, "B M"]) -> Float[Tensor, "B 1"]:
        terms: Tensor = torch.special.entr(torch.softmax(logits, 1))
        return terms.sum(1, keepdim=True)

    def decision(self, numbers: Float[Tensor, "B M"], *, are_logits: bool) -> Int[Tensor, "B 1"]:
        return numbers.argmax(1, keepdim=True)

    def log_likelihood(self, logits: Float[Tensor, "B M"], labels: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
        log_probability = torch.log_softmax(logits.double(), 1)
        return log_probability.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]

    def uniforms(self, columns: int) -> int:
        return 1

    def drawn(self, logits: Float[Tensor, "B M"], uniform: Float[Tensor, "B k 1"]) -> Int[Tensor, "B k"]:
        """By the inverse of the distribution function of softmax(g)."""
        cumulative = torch.softmax(logits.double(), 1).cumsum(1)
        labels = torch.searchsorted(cumulative, uniform[:, :, 0] * cumulative[:, -1:], right=True)
        return labels.clamp_max(logits.shape[1] - 1)

    def scores(
        self, logits: Float[Tensor, "B M"], drawn: Int[Tensor, "B k"], labels: Int[Tensor, "B"] | None
    ) -> Float[Tensor, "k B M"]:
        """e_y − f."""
        scores = -torch.softmax(logits.double(), 1).repeat(drawn.shape[1], 1, 1)
        return scores.scatter_add_(2, drawn.T[..., None], torch.ones_like(scores[..., :1]))


class _Labels(OutputKind):
    """L labels, each of which is true or false whatever the others are."""

    name = "labels"
    has_gauge = False
    is_diagonal = True
    noun = "labels"

    def logits_of(self, value: Tensor, size: int) -> Float[Tensor, "B L"]:
        if not _is_table(value, size):
            raise ModelError(
                f"The model returned a {value.dtype} tensor of shape {tuple(value.shape)} for a batch of {size}; "
                f"expected floating-point logits of shape ({size}, labels) for outputs='labels'"
                f"{_or_positions(value, size)}."
            )
        return value

    def labels_of(
        self, labels: Any, *, size: int, columns: int, device: torch.device, checks: Checks | None = None
    ) -> Int[Tensor, "B L"]:
        """0, 1 or −1, as whole numbers, floats or bools; of a single label also without its dimension."""
        values = labels_as_tensor(labels, device, f"0, 1 or {MISSING} of shape ({size}, {columns})")
        if columns == 1 and values.shape == (size,):
            values = values[:, None]
        if values.shape != (size, columns):
            advice = (
                "For one class number for each input, the model is one of outputs='classes'."
                if values.shape == (size,)
                else "Give one number for each label of each input."
            )
            raise LabelError(
                f"Labels have shape {tuple(values.shape)}; expected ({size}, {columns}) for outputs='labels': 0, 1 or, "
                f"where one is missing, {MISSING}. {advice}"
            )
        if values.is_complex():
            raise LabelError(f"Labels are {values.dtype}; expected 0, 1 or, where one is missing, {MISSING}.")
        are_labels = (values == 0) | (values == 1) | (values == MISSING)
        (checks or Checks(torch.device("cpu"))).require(
            are_labels.all(),
            lambda: LabelError(
                f"A label is {values[~are_labels][0].item()!r}; expected 0, 1 or, where one is missing, {MISSING}."
            ),
        )
        return values.long()

    def counted(self, labels: Int[Tensor, "B L"] | None) -> Bool[Tensor, "B L"] | None:
        return None if labels is None else labels >= 0

    def probability(self, logits: Float[Tensor, "B L *K"]) -> Float[Tensor, "B L *K"]:
        return torch.sigmoid(logits)

    def entropy(self, logits: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
        f = torch.sigmoid(logits)
        return -(f * torch.nn.functional.logsigmoid(logits) + (1 - f) * torch.nn.functional.logsigmoid(-logits))

    def decision(self, numbers: Float[Tensor, "B L"], *, are_logits: bool) -> Int[Tensor, "B L"]:
        return (numbers > (0.0 if are_logits else 0.5)).long()

    def log_likelihood(self, logits: Float[Tensor, "B L"], labels: Int[Tensor, "B L"]) -> Float[Tensor, "B"]:
        """Σ_l ln σ(±g_l) over the labels that are given."""
        signed = torch.where(labels > 0, logits, -logits).double()
        return torch.where(labels >= 0, torch.nn.functional.logsigmoid(signed), 0.0).sum(1)

    def uniforms(self, columns: int) -> int:
        return columns

    def drawn(self, logits: Float[Tensor, "B L"], uniform: Float[Tensor, "B k L"]) -> Int[Tensor, "B k L"]:
        """Each label by itself."""
        return (uniform < torch.sigmoid(logits.double())[:, None]).long()

    def scores(
        self, logits: Float[Tensor, "B L"], drawn: Int[Tensor, "B k L"], labels: Int[Tensor, "B L"] | None
    ) -> Float[Tensor, "k B L"]:
        """y − f."""
        scores = drawn.transpose(0, 1) - torch.sigmoid(logits.double())
        counted = self.counted(labels)
        return scores if counted is None else scores * counted


CLASSES, LABELS = _Classes(), _Labels()
KINDS: dict[str, OutputKind] = {kind.name: kind for kind in (CLASSES, LABELS)}


def require_outputs(outputs: object) -> OutputKind:
    if isinstance(outputs, str) and outputs in KINDS:
        return KINDS[outputs]
    raise ArgumentError(
        f"outputs is {outputs!r}; expected 'classes' (one of M classes, by a softmax), 'labels' (L labels that are "
        "true or false, by a sigmoid each) or 'positions' (one of M classes for every token or pixel)."
    )


def kind_called(outputs: object) -> OutputKind:
    """The kind that `outputs=` names; every position is one of M classes."""
    return CLASSES if outputs == POSITIONS else require_outputs(outputs)


def require_classes_alone(outputs: object, name: str) -> None:
    """Refuse other outputs, in the name of what has only been made for one of M classes."""
    if outputs == POSITIONS or require_outputs(outputs) != CLASSES:
        raise ArgumentError(
            f"{name} is for one of M classes, and outputs is {outputs!r}; expected outputs='classes'. Use "
            f"errbar.fit(..., outputs={outputs!r}) and errbar.calibrate."
        )


def _or_positions(value: Tensor, size: int) -> str:
    """What else logits of three or four dimensions may be."""
    fits = value.ndim in (3, 4) and value.shape[0] == size and value.is_floating_point()
    return "; or, for a class of every token or pixel, pass outputs='positions' to errbar.fit" if fits else ""


def _is_table(value: Tensor, size: int) -> bool:
    return value.ndim == 2 and value.shape[0] == size and value.shape[1] > 0 and value.is_floating_point()
