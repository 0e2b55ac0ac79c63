"""What a user calls data, as a stream of batches that a model can be called with.

A batch is `x`, `(x,)`, `(x, y, …)` or a mapping; `unpack(batch) → (args, kwargs, labels)` handles the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from errbar.checks import Checks
from errbar.errors import DataError, LabelError

Unpack = Callable[[Any], tuple[tuple[Any, ...], Mapping[str, Any], Any]]

# Large enough for efficient products, small enough for any network that was trained on this machine.
_DATASET_BATCH = 256


@dataclass(frozen=True)
class Batch:
    """Arguments for one call of the model; `labels` as the user gave them, not yet checked."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    labels: Any = None

    def __len__(self) -> int:
        """The number of samples: the first dimension of the first tensor."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.ndim > 0:
                return value.shape[0]
        raise DataError(
            "A batch holds no tensor to count its samples by; expected x, (x, y) or a mapping with tensors. "
            "Pass unpack=, a function from a batch to (args, kwargs, labels)."
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same call with `function` applied to each tensor argument."""

        def apply(value: Any) -> Any:
            return function(value) if isinstance(value, Tensor) else value

        args = tuple(apply(value) for value in self.args)
        return Batch(args, {name: apply(value) for name, value in self.kwargs.items()}, self.labels)

    def rows(self, start: int, stop: int) -> Batch:
        """Samples start … stop−1. Tensors that do not run over the samples are passed on whole."""
        size = len(self)
        part = self.map(lambda t: t[start:stop] if t.ndim > 0 and t.shape[0] == size else t)
        labels = self.labels
        if isinstance(labels, Tensor) and labels.ndim > 0:
            labels = labels[start:stop]
        return Batch(part.args, part.kwargs, labels)

    def parts(self, size: int) -> Iterator[Batch]:
        """The samples in parts of `size`, the last one with what is left."""
        for start in range(0, len(self), size):
            yield self.rows(start, min(start + size, len(self)))


def to_batch(value: Any, unpack: Unpack | None = None) -> Batch:
    """One batch in whatever form a loader yields it."""
    if unpack is not None:
        try:
            args, kwargs, labels = unpack(value)
            return Batch(tuple(args), dict(kwargs), labels)
        except (TypeError, ValueError) as error:
            raise DataError(
                "unpack(batch) did not return (args, kwargs, labels): expected a tuple of positional arguments, "
                f"a mapping of keyword arguments, and labels or None ({error})."
            ) from error
    if isinstance(value, Tensor):
        return Batch((value,))
    if isinstance(value, Mapping):
        return Batch((), {k: v for k, v in value.items() if k != "labels"}, value.get("labels"))
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], Tensor):
        return Batch((value[0],), {}, value[1] if len(value) > 1 else None)
    raise DataError(
        f"Cannot read a batch of type {_describe(value)}; expected a tensor x, (x,), (x, labels, ...) or a "
        "mapping. Pass unpack=, a function from a batch to (args, kwargs, labels)."
    )


def input_batch(x: Any) -> Batch:
    """One batch of inputs for `predict` and `logits`: a tensor or a mapping, not a loader."""
    if isinstance(x, Batch):
        return x
    if isinstance(x, (Tensor, Mapping)):
        return to_batch(x)
    raise DataError(
        f"Expected one batch of inputs, a tensor or a mapping of tensors, got {_describe(x)}. "
        "For a loader, call this once for each of its batches."
    )


def batches(data: Any, unpack: Unpack | None = None) -> Iterator[Batch]:
    """The batches of a Dataset, a DataLoader or an iterable of batches, one by one."""
    for value in _iterable(data):
        yield to_batch(value, unpack)


def count_batches(data: Any) -> int | None:
    """How many batches there will be, where that can be known beforehand."""
    try:
        size = len(data)
    except TypeError:
        return None
    return -(-size // _DATASET_BATCH) if isinstance(data, Dataset) else size


def _iterable(data: Any) -> Iterable[Any]:
    if isinstance(data, Tensor):
        raise DataError(
            f"Got a bare tensor of shape {tuple(data.shape)} as data; expected a Dataset, a DataLoader or an "
            "iterable of batches. For a single batch pass [x] or [(x, labels)]."
        )
    if isinstance(data, Dataset):
        return DataLoader(data, batch_size=_DATASET_BATCH, generator=torch.Generator().manual_seed(0))
    looks_like_a_batch = isinstance(data, Mapping) or (
        isinstance(data, (tuple, list))
        and len(data) == 2
        and all(isinstance(part, Tensor) for part in data)
        and data[0].ndim != data[1].ndim
    )
    if looks_like_a_batch:
        raise DataError(
            f"Got a single batch ({_describe(data)}) as data; expected an iterable of batches. Pass [batch]."
        )
    if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
        raise DataError(
            f"Cannot read data of type {_describe(data)}; expected a Dataset, a DataLoader or an iterable of batches."
        )
    return data


def checked_labels(
    labels: Any, *, size: int, classes: int, device: torch.device, checks: Checks | None = None
) -> Int[Tensor, "B"]:
    """Labels as integers 0 … M−1 on `device`; `LabelError` in words otherwise.

    Two classes may also come as 0.0 and 1.0, with or without a trailing dimension, because that is what the binary
    cross-entropy that one-logit models are trained with asks for.
    """
    if labels is None:
        raise LabelError(
            "Labels are missing: expected batches (x, labels), or a mapping with 'labels'. Pass unpack= if the "
            "labels are somewhere else in the batch."
        )
    try:
        values = torch.as_tensor(labels).to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(f"Labels are {_describe(labels)}; expected integers 0 to {classes - 1}.") from error
    if classes == 2 and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (size,):
        raise LabelError(
            f"Labels have shape {tuple(values.shape)}; expected ({size},), one class number for each input. "
            "Turn one-hot rows into class numbers with argmax(1)."
        )
    if values.is_complex():
        raise LabelError(f"Labels are {values.dtype}; expected integers 0 to {classes - 1}.")
    whole = values.long()
    is_binary_float = classes == 2 and values.is_floating_point() and bool((values == whole).all())
    if values.is_floating_point() and not is_binary_float:
        raise LabelError(f"Labels are {values.dtype}; expected integers 0 to {classes - 1}.")
    in_range = ((whole >= 0) & (whole < classes)).all()
    (checks or Checks(torch.device("cpu"))).require(
        in_range,
        lambda: LabelError(
            f"Labels run from {int(whole.min())} to {int(whole.max())}; expected 0 to {classes - 1}, because the "
            f"model has {classes} classes."
        ),
    )
    return whole


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(part).__name__ for part in value[:4])
        return f"{type(value).__name__} of ({inside}{', …' if len(value) > 4 else ''})"
    return type(value).__name__
