"""Things of the user's own code by their name, `package.module:callable`; modules in the current folder count too."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errbar.errors import ArgumentError, ErrbarError, MissingExtraError


def named(where: str, what: str) -> Any:
    """What `package.module:attribute` is; `what` says in a sentence what it should have been."""
    name, _, attribute = where.partition(":")
    if not name or not attribute:
        raise ArgumentError(f"The {what} is {where!r}; expected package.module:callable, for example project.net:load.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"The {what} {where!r} cannot be imported: {error}.") from error
    except Exception as error:
        raise ArgumentError(
            f"The {what} {where!r} cannot be imported: its module raised {_told(error)}. Expected a module that can "
            "be imported without arguments."
        ) from error
    return found


def called(function: Callable[[], Any], where: str, what: str) -> Any:
    """What the user's function returns when it is called without arguments."""
    if not callable(function):
        raise ArgumentError(f"The {what} {where!r} is a {type(function).__name__}; expected a callable.")
    try:
        return function()
    except ErrbarError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"The {what} {where!r} raised {_told(error)}. Expected a callable that needs no arguments."
        ) from error


def extra(module: str, purpose: str, package: str, name: str) -> Any:
    """An optional dependency, or a sentence that says which extra has it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: pip install 'errbar[{name}]'."
        ) from missing


def _told(error: Exception) -> str:
    """The type and the first line of what went wrong."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
