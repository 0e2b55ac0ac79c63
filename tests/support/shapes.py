"""A type checker for the tests that looks at the shapes in annotations and at nothing else.

jaxtyping's import hook applies it to every function of the package. Annotations without a shape are left alone,
because the package has to be called with wrong types here: that each mistake gets an error in words is what
`test_errors.py` checks. For the same reason constructors, which check their arguments themselves, are skipped.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray

Function = TypeVar("Function", bound=Callable[..., Any])


def check_shapes(function: Function) -> Function:
    """`function`, with the shapes of its array arguments and results checked at every call."""
    if function.__name__ == "__init__":
        return function
    function.__annotations__ = {
        name: hint if _is_shape(hint) else Any for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _is_shape(hint: Any) -> bool:
    """An array type, or a tuple, list, dict or union that holds nothing but array types, names and None."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    containers = (tuple, list, dict, types.UnionType)
    inside = [part for part in get_args(hint) if part not in (str, type(None))]
    return get_origin(hint) in containers and bool(inside) and all(_is_shape(part) for part in inside)
