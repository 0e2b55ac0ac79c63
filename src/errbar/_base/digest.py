"""SHA-256 of nested values: tensors, arrays, numbers and text, the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest_of(values: Iterable[Any]) -> str:
    """The digest of these values, however nested; of objects of other classes only the name of the class counts.

    >>> digest_of([torch.zeros(2), "labels", [1, None]]) == digest_of([torch.zeros(2), "labels", [1, None]])
    True
    """
    digest = hashlib.sha256()
    for value in values:
        _add(digest, value)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        dense = plain if plain.layout == torch.strided else plain.to_dense()
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)};".encode())
        for name, inside in value.items():
            digest.update(f"{name!r};".encode())
            _add(digest, inside)
    elif isinstance(value, (list, tuple)):
        digest.update(f"sequence {len(value)};".encode())
        for inside in value:
            _add(digest, inside)
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    elif hasattr(value, "__array__"):
        _add_array(digest, np.asarray(value))
    else:
        # An object of the user's: nothing is known of it that stays the same in another process.
        digest.update(f"{type(value).__qualname__};".encode())


def _add_array(digest: Any, array: np.ndarray[Any, Any]) -> None:
    if array.dtype == object:
        _add(digest, [*array.flat])
        return
    try:
        # What could be a tensor counts as one: labels may be either.
        _add(digest, torch.as_tensor(array))
    except (TypeError, ValueError):
        digest.update(f"array {array.dtype} {array.shape};".encode() + array.tobytes())
