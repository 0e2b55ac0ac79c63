"""Things of the user's own code by their name, `package.module:callable`; modules in the current folder count too."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errbar.errors import ArgumentError, ErrbarError, MissingExtraError, how_to_install

_IN_WORKER = "Original Traceback"


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
        similar = _similar(error)
        hint = f" Did you mean {similar}?" if similar else ""
        raise ArgumentError(f"The {what} {where!r} cannot be imported: {str(error).rstrip('.')}.{hint}") from error
    except SystemExit as error:
        raise ArgumentError(
            f"The {what} {where!r} cannot be imported: its module is a program that ended with {error.code!r}. "
            "Expected what runs to stand under if __name__ == '__main__'."
        ) from error
    except Exception as error:
        raise ArgumentError(
            f"The {what} {where!r} cannot be imported: its module raised {told_with_place(error)}. Expected a module "
            "that can be imported without arguments."
        ) from error
    return found


def _similar(error: ImportError | AttributeError) -> str | None:
    """The name nearest to one that is missing, among those that are there."""
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    there = {name.lower(): name for name in dir(error.obj) if not name.startswith("_")}
    found = difflib.get_close_matches(error.name.lower(), there, n=1)
    return there[found[0]] if found else None


def called(function: Callable[[], Any], where: str, what: str) -> Any:
    """What the user's function returns when it is called without arguments."""
    if not callable(function):
        raise ArgumentError(f"The {what} {where!r} is a {type(function).__name__}; expected a callable.")
    try:
        return function()
    except ErrbarError:
        raise
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"The {what} {where!r} raised {told_with_place(error)}. Expected a callable that needs no arguments."
        ) from error


def extra(module: str, purpose: str, package: str, name: str) -> Any:
    """An optional dependency, or a sentence that says which extra has it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: {how_to_install(name)}."
        ) from missing


def told(error: BaseException) -> str:
    """The type and the first line of what went wrong, without a full stop."""
    lines = str(error).strip().splitlines()
    if _IN_WORKER in str(error):
        return lines[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def told_with_place(error: BaseException) -> str:
    """What went wrong, and in which line of the user's code."""
    place = place_in_user_code(error)
    return told(error) if place is None else f"{told(error)} (in {place})"


def place_in_user_code(error: BaseException) -> str | None:
    """The last line on the way to an error that is neither of errbar nor of an installed library, if there is one."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    known = [Path(place).resolve() for place in installed] + [Path(__file__).resolve().parents[1]]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if _IN_WORKER in str(error):
        # A process of a DataLoader failed; its traceback comes as a text.
        places += [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    for name, line in reversed(places):
        file = Path(name).resolve()
        if file.is_file() and not any(file.is_relative_to(place) for place in known):
            return f"line {line} of {name}"
    return None
