"""The user's data, as a stream of batches with which a model can be called.

A batch is `x`, `(x,)`, `(x, y, …)` or a mapping; `unpack(batch) → (args, kwargs, labels)` handles the rest, and may
return the weight of each sample as a fourth value; in a mapping that is `weights`. Its arguments may hold tensors in
dicts, lists and tuples, whose first dimension is the samples, and PackedSequences.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)
from torch.utils.data import DataLoader, Dataset

from errbar._base.checks import Checks
from errbar.errors import ArgumentError, DataError, DataWarning, ErrbarError, LabelError

Call = tuple[tuple[Any, ...], Mapping[str, Any], Any] | tuple[tuple[Any, ...], Mapping[str, Any], Any, Any]
Unpack = Callable[[Any], Call]
Form = Literal["tensor", "mapping", "sequence", "other"]

FORMS: tuple[Form, ...] = ("tensor", "mapping", "sequence", "other")
# Large enough for efficient products, small enough for any network that was trained on this machine.
_DATASET_BATCH = 256
# The weights of the samples in a mapping.
_WEIGHTS = "weights"
# What an `unpack` raises on a batch that it was not written for.
_UNFIT = (TypeError, ValueError, LookupError, AttributeError, RuntimeError)


@dataclass(frozen=True)
class Batch:
    """Arguments for one call of the model; `labels` and `weights` as the user gave them, not yet checked.

    `form` is what the batch was before it was read. `by_name` says that the weights are those of a mapping, which the
    model may want for itself (`Network.prepare`). `keys` know the samples where their numbers do not: positions of an
    input, whose numbers are what a network made of it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    labels: Any = None
    form: Form = "tensor"
    weights: Any = None
    by_name: bool = False
    keys: Int[Tensor, "B"] | None = None

    @property
    def _is_one_tensor(self) -> bool:
        """As most batches are. What goes through all arguments would take a tenth of a prediction for one input."""
        return len(self.args) == 1 and isinstance(self.args[0], Tensor) and not self.kwargs

    def __len__(self) -> int:
        """The number of samples: the first dimension of the first tensor."""
        if self._is_one_tensor and self.args[0].ndim > 0:
            return int(self.args[0].shape[0])
        for value in leaves((self.args, self.kwargs)):
            if isinstance(value, PackedSequence):
                return int(value.batch_sizes[0])
            if value.ndim > 0:
                return len(value)
        raise DataError(
            "A batch holds no tensor to count its samples by; expected x, (x, y) or a mapping with tensors. "
            "Pass unpack=, a function from a batch to (args, kwargs, labels)."
        )

    def tensors(self) -> list[Tensor]:
        """All tensors of the call, wherever in its arguments; of a PackedSequence its data."""
        if self._is_one_tensor:
            return [self.args[0]]
        found = leaves((self.args, self.kwargs))
        return [leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in found]

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same call with `function` applied to each tensor in its arguments."""
        if self._is_one_tensor:
            args = (function(self.args[0]),)
            return Batch(args, self.kwargs, self.labels, self.form, self.weights, self.by_name, self.keys)
        args, kwargs = _mapped((self.args, self.kwargs), lambda leaf: _applied(function, leaf))
        return replace(self, args=args, kwargs=kwargs)

    def rows(self, start: int, stop: int) -> Batch:
        """Samples start … stop−1. Tensors that do not run over the samples are passed on whole."""
        size = len(self)

        def cut(leaf: Any) -> Any:
            if isinstance(leaf, PackedSequence):
                return _packed_rows(leaf, start, min(stop, size))
            return leaf[start:stop] if _runs(leaf, size) else leaf

        args, kwargs = _mapped((self.args, self.kwargs), cut)
        labels, weights, keys = (
            part[start:stop] if isinstance(part, Tensor) and part.ndim > 0 else part
            for part in (self.labels, self.weights, self.keys)
        )
        return replace(self, args=args, kwargs=kwargs, labels=labels, weights=weights, keys=keys)

    def parts(self, size: int) -> Iterator[Batch]:
        """The samples in parts of `size`; the last may be smaller."""
        count = len(self)
        if 0 < count <= size:
            yield self
            return
        for start in range(0, count, size):
            yield self.rows(start, min(start + size, count))

    @property
    def can_be_mapped(self) -> bool:
        """Whether `torch.vmap` can go over the samples: not over those of a PackedSequence."""
        return not any(isinstance(leaf, PackedSequence) for leaf in leaves((self.args, self.kwargs)))

    def over_samples(self) -> list[Tensor]:
        """The tensors that run over the samples, in the order in which `with_sample` takes their rows."""
        size = len(self)
        return [leaf for leaf in self.tensors() if _runs(leaf, size)]

    def with_sample(self, rows: Sequence[Tensor]) -> Batch:
        """The call for one sample, from one row of each of `over_samples`."""
        size, remaining_rows = len(self), iter(rows)
        return self.map(lambda leaf: next(remaining_rows)[None] if _runs(leaf, size) else leaf)


def _runs(leaf: Tensor, size: int) -> bool:
    """Whether a tensor runs over the samples."""
    return leaf.ndim > 0 and leaf.shape[0] == size


def leaves(value: Any) -> Iterator[Any]:
    """The tensors and PackedSequences of an argument, which may be a dict, a list or a tuple of such."""
    if isinstance(value, (Tensor, PackedSequence)):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same argument with `function` applied to each of its leaves; one without leaves is returned as it is."""
    if isinstance(value, (Tensor, PackedSequence)):
        return function(value)
    if next(leaves(value), None) is None:
        return value
    if isinstance(value, Mapping):
        parts = {name: _mapped(part, function) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        # A tokenizer's encoding, an ordered dict: a copy keeps its type.
        mapping = copy.copy(value)
        mapping.update(parts)
        return mapping
    items = [_mapped(part, function) for part in value]
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items


def _applied(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if not isinstance(leaf, PackedSequence):
        return function(leaf)
    # The sizes of its batches stay on the CPU, where recurrent layers want them.
    orders = (None if order is None else function(order) for order in (leaf.sorted_indices, leaf.unsorted_indices))
    return PackedSequence(function(leaf.data), leaf.batch_sizes, *orders)


def _packed_rows(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Some of the sequences, packed again."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    in_order = packed.sorted_indices is None
    row_lengths = lengths[start:stop]
    return pack_padded_sequence(padded[start:stop], row_lengths, batch_first=True, enforce_sorted=in_order)


def pieces(batch: Batch, size: Callable[[], int] | int | None) -> Iterator[Batch]:
    """The samples in parts of `size`, which may change from part to part; whole without one, and where what belongs to
    them is no tensor yet."""
    own = (batch.labels, batch.weights, batch.keys)
    if size is None or not all(part is None or isinstance(part, Tensor) for part in own):
        yield batch
    elif not callable(size):
        yield from batch.parts(size)
    else:
        start, count = 0, len(batch)
        while start < count:
            end = min(start + size(), count)
            yield batch if end - start == count else batch.rows(start, end)
            start = end


def joined(inputs: Sequence[Batch]) -> Batch:
    """Batches of one sample each, without labels, as one batch."""
    first = inputs[0]
    columns = iter(zip(*(leaves((batch.args, batch.kwargs)) for batch in inputs), strict=True))

    def together(leaf: Any) -> Any:
        column = next(columns)
        if isinstance(leaf, PackedSequence):
            return pack_sequence([row for part in column for row in unpack_sequence(part)], enforce_sorted=False)
        return torch.cat(column) if _runs(leaf, 1) else leaf

    args, kwargs = _mapped((first.args, first.kwargs), together)
    return replace(first, args=args, kwargs=kwargs, labels=None, weights=None)


def form_of(value: Any) -> Form:
    """What a batch is before it is read; a PackedSequence, though a tuple, is as good as a tensor."""
    if isinstance(value, (Tensor, PackedSequence)):
        return "tensor"
    if isinstance(value, Mapping):
        return "mapping"
    return "sequence" if isinstance(value, (list, tuple)) else "other"


@dataclass(frozen=True, eq=False)
class Kept:
    """A user's function that is part of a value: copies share it; pickling needs a function that can be pickled."""

    function: Callable[[Any], Any]
    name: str

    def __call__(self, value: Any) -> Any:
        return self.function(value)

    def __copy__(self) -> Kept:
        return self

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.function)
        except Exception as error:
            raise ArgumentError(
                f"{self.name} is {self.function!r}, which cannot be pickled with the rest; expected a function that is "
                "defined by def at the top level of a module. Or save the posterior, and give the function to "
                f"errbar.load(path, model, {self.name}=...)."
            ) from error
        return type(self), self._state()

    def _state(self) -> tuple[Any, ...]:
        return self.function, self.name


@dataclass(frozen=True, eq=False)
class KeptUnpack(Kept):
    """The `unpack` of a fit, for what comes later; `form` is what the batches of the fit were, None if unknown.

    Labels may be left out of a batch: (a, b) then stands for (a, b, labels), and x alone for (x, labels). So may
    weights, or labels and weights: samples without a weight count for one. A tensor or a mapping goes to the model as
    it is if the batches of the fit had another form.
    """

    name: str = "unpack"
    form: Form | None = None

    def __call__(self, value: Any) -> Call:
        form = form_of(value)
        if self.form is None or form in (self.form, "sequence", "other"):
            try:
                call: Call = self.function(value)
                return call
            except _UNFIT:
                unlabelled = self._without_labels(tuple(value)) if form == "sequence" else None
                if unlabelled is None:
                    raise
                return unlabelled
        unlabelled = self._without_labels((value,)) if self.form == "sequence" else None
        if unlabelled is not None:
            return unlabelled
        plain = to_batch(value)
        return plain.args, plain.kwargs, plain.labels, plain.weights

    def _without_labels(self, parts: tuple[Any, ...]) -> Call | None:
        """What the function makes of a batch that lacks only its weights, its labels or both, at the end; None if it
        needs more."""
        for missing in (1, 2):
            nothing = [object() for _ in range(missing)]
            try:
                args, kwargs, *rest = self.function((*parts, *nothing))
                inputs = [*args, *kwargs.values()]
            except _UNFIT:
                continue
            if all(_holds(rest, part) and not _holds(inputs, part) for part in nothing):
                labels, *weights = (None if any(part is one for one in nothing) else part for part in rest)
                return args, kwargs, labels, *weights
        return None

    def _state(self) -> tuple[Any, ...]:
        return self.function, self.name, self.form


def _holds(value: Any, item: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(part, item) for part in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(part, item) for part in value)
    return value is item


def kept_unpack(unpack: Unpack | None, form: Form | None) -> KeptUnpack | None:
    """The `unpack` of a fit, as a posterior keeps it."""
    if unpack is None:
        return None
    return unpack if isinstance(unpack, KeptUnpack) else KeptUnpack(unpack, form=form)


def to_batch(value: Any, unpack: Unpack | None = None) -> Batch:
    """One batch in whatever form a loader yields it; one that has been read is itself."""
    if isinstance(value, Batch):
        return value
    form = form_of(value)
    if unpack is not None:
        return _unpacked(value, unpack, form)
    if isinstance(value, (Tensor, PackedSequence)):
        return Batch((value,), form=form)
    if isinstance(value, Mapping):
        kwargs = {name: part for name, part in value.items() if name not in ("labels", _WEIGHTS)}
        weights = value.get(_WEIGHTS)
        return Batch((), kwargs, value.get("labels"), form, weights, by_name=weights is not None)
    if _starts_with_input(value):
        return Batch((value[0],), {}, value[1] if len(value) > 1 else None, form)
    raise DataError(
        f"Cannot read a batch of type {_describe(value)}; expected a tensor x, (x,), (x, labels, ...) or a "
        "mapping. Pass unpack=, a function from a batch to (args, kwargs, labels)."
    )


def _starts_with_input(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) > 0 and isinstance(value[0], (Tensor, PackedSequence))


def _unpacked(value: Any, unpack: Unpack, form: Form) -> Batch:
    if not callable(unpack):
        raise ArgumentError(f"unpack is {unpack!r}; expected a function from a batch to (args, kwargs, labels).")
    try:
        call = unpack(value)
    except (ErrbarError, torch.OutOfMemoryError):
        raise
    except _UNFIT as error:
        raise DataError(
            f"unpack(batch) failed on a batch of type {_describe(value)} ({type(error).__name__}: {error}). Expected "
            "batches like those of the fit, or pass unpack=, a function for these."
        ) from error
    try:
        args, kwargs, labels, *rest = call
        if isinstance(args, (Tensor, str, Mapping)):
            raise TypeError(f"the arguments are a {type(args).__name__}")
        if len(rest) > 1:
            raise ValueError(f"got {3 + len(rest)} values")
        return Batch(tuple(args), dict(kwargs), labels, form, rest[0] if rest else None)
    except (TypeError, ValueError) as error:
        raise DataError(
            "unpack(batch) did not return (args, kwargs, labels): expected a tuple of positional arguments, "
            f"a mapping of keyword arguments, labels or None, and perhaps the weights of the samples ({error})."
        ) from error


def input_batch(x: Any, unpack: Unpack | None = None) -> Batch:
    """One batch of inputs for `predict` and `logits`: a tensor, a mapping, (x, …), or what `unpack` takes."""
    if isinstance(x, Batch):
        return x
    if is_stream(x):
        raise DataError(
            f"Expected one batch of inputs, got {_describe(x)}. Only predict and logits take data of several batches; "
            "call this once for each of them."
        )
    if unpack is not None:
        return to_batch(x, unpack)
    if isinstance(x, (Tensor, PackedSequence, Mapping)):
        return to_batch(x)
    if _starts_with_input(x):
        _require_one_batch(x)
        return to_batch(x)
    raise DataError(
        f"Expected one batch of inputs, a tensor or a mapping of tensors, (x, ...), or a DataLoader or a Dataset, got "
        f"{_describe(x)}. Pass unpack=, a function from a batch to (args, kwargs, labels)."
    )


def input_batches(data: Any, unpack: Unpack | None = None) -> Iterator[Batch]:
    """The batches of data for which `is_stream` holds, as inputs alone; `DataError` if there are none."""
    empty = True
    for value in _iterable(data):
        empty = False
        yield input_batch(value, unpack)
    if empty:
        raise DataError("The data are empty: expected at least one batch.")


def _require_one_batch(parts: Sequence[Any]) -> None:
    """Refuse what looks like a list of inputs rather than (x, labels, …): the second would be ignored."""
    x, second = parts[0], parts[1] if len(parts) > 1 else None
    if (
        isinstance(x, Tensor)
        and isinstance(second, Tensor)
        and second.ndim > 1
        and second.shape[1:] == x.shape[1:] != (1,)
    ):
        raise DataError(
            f"Got {_describe(parts)} whose tensors are alike; a list or a tuple is one batch, (x, labels, ...), of "
            "which x alone goes to the model. Pass unpack= for a model of several inputs, here or to the fit; for "
            "several batches pass a DataLoader, or torch.cat them."
        )


def is_stream(data: Any) -> bool:
    """Whether these are batches one after the other: a DataLoader, a Dataset or an iterator, never a list or tuple."""
    return isinstance(data, (DataLoader, Dataset, Iterator))


def batches(data: Any, unpack: Unpack | None = None, *, quiet: bool = False) -> Iterator[Batch]:
    """The batches of a Dataset, a DataLoader or an iterable of batches, one by one.

    Warns once about ignored weights, unless `quiet`.
    """
    is_quiet = quiet or unpack is not None
    for value in _iterable(data):
        batch = to_batch(value, unpack)
        if not is_quiet and isinstance(value, (list, tuple)):
            is_quiet = _warned_of_weights(value[2:], len(batch))
        yield batch


def _warned_of_weights(rest: Sequence[Any], size: int) -> bool:
    """Warn where one of the elements after x and labels looks like one weight for each sample."""
    for position, part in enumerate(rest, start=3):
        is_array = isinstance(part, np.ndarray) and np.issubdtype(part.dtype, np.floating)
        if (is_array or (isinstance(part, Tensor) and part.is_floating_point())) and tuple(part.shape) == (size,):
            warnings.warn(
                f"Element {position} of a batch, {size} numbers, looks like a weight for each sample and is ignored: "
                "all samples count alike. Pass unpack=lambda batch: ((batch[0],), {}, batch[1], batch["
                f"{position - 1}]) to count it; or leave it out of the batch, or of that function, to say that this is "
                "meant.",
                DataWarning,
                stacklevel=3,
            )
            return True
    return False


def raw_batches(data: Any) -> Iterator[Any]:
    """Each batch as the data yield it."""
    yield from _iterable(data)


def with_raw(data: Any, unpack: Unpack | None) -> Iterator[tuple[Any, Batch]]:
    """Each batch as the data yield it, and as it is read."""
    for value in _iterable(data):
        yield value, to_batch(value, unpack)


def count_batches(data: Any) -> int | None:
    """The number of batches, if it is known beforehand."""
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
    """Labels as integers 0 … M−1 on `device`; `LabelError` otherwise.

    Two classes may also be given as 0.0 and 1.0, with or without a trailing dimension, because binary cross-entropy,
    the loss of one-logit models, requires that.
    """
    values = labels_as_tensor(labels, device, f"integers 0 to {classes - 1}")
    if classes == 2 and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (size,):
        raise LabelError(
            f"Labels have shape {tuple(values.shape)}; expected ({size},), one class number for each input. "
            f"Turn one-hot rows into class numbers with argmax(1){_or_several(values, size, classes)}."
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


def labels_as_tensor(labels: Any, device: torch.device, expected: str) -> Tensor:
    """The user's labels on `device`; `LabelError` if there are none, or if they are no numbers."""
    if labels is None:
        raise LabelError(
            "Labels are missing: expected batches (x, labels), or a mapping with 'labels'. Pass unpack= if the "
            "labels are somewhere else in the batch."
        )
    try:
        return torch.as_tensor(labels).to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(f"Labels are {_describe(labels)}; expected {expected}.") from error


def _or_several(values: Tensor, size: int, classes: int) -> str:
    """What else a table of labels with a column for each output may be."""
    fits = values.shape in ((size, classes), (size, 1))
    return "; or, if each output is a label by itself, pass outputs='labels' to errbar.fit" if fits else ""


def checked_weights(weights: Any, *, size: int, device: torch.device, checks: Checks) -> Float[Tensor, "B"]:
    """The weight of each sample in float64 on `device`; `DataError` unless they are finite numbers of zero or more."""
    try:
        values = torch.as_tensor(weights).to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The weights are {_describe(weights)}; expected one number for each sample.") from error
    if values.shape != (size,) or values.is_complex() or values.dtype == torch.bool:
        raise DataError(
            f"The weights are {values.dtype} of shape {tuple(values.shape)}; expected ({size},), one number for each "
            "sample."
        )
    values = values.detach().double()
    checks.require(
        (torch.isfinite(values) & (values >= 0)).all(),
        lambda: DataError(
            "A weight is negative, NaN or infinite; expected finite numbers of zero or more, one for each sample."
        ),
    )
    return values


def _describe(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(part).__name__ for part in value[:4])
        return f"{type(value).__name__} of ({inside}{', …' if len(value) > 4 else ''})"
    return type(value).__name__
