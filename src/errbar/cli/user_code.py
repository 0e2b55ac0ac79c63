"""The user's own code by its name, `package.module:callable`, also in the current folder; and where it failed."""

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

from errbar.errors import ArgumentError, ErrbarError

_IN_WORKER = "Original Traceback"


def named(where: str, role: str) -> Any:
    """What `package.module:attribute` is; `role` says in a sentence what it should have been."""
    name, _, attribute = where.partition(":")
    if not name or not attribute:
        raise ArgumentError(f"The {role} is {where!r}; expected package.module:callable, for example project.net:load.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = importlib.import_module(name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        similar = _similar(error)
        hint = f" Did you mean {similar}?" if similar else ""
        raise ArgumentError(f"The {role} {where!r} cannot be imported: {str(error).rstrip('.')}.{hint}") from error
    except SystemExit as error:
        raise ArgumentError(
            f"The {role} {where!r} cannot be imported: its module is a program that ended with {error.code!r}. "
            "Expected what runs to stand under if __name__ == '__main__'."
        ) from error
    except Exception as error:
        raise ArgumentError(
            f"The {role} {where!r} cannot be imported: its module raised {description_with_place(error)}. Expected a "
            "module that can be imported without arguments."
        ) from error
    return value


def _similar(error: ImportError | AttributeError) -> str | None:
    """The name nearest to one that is missing, among those that are there."""
    if not isinstance(error, AttributeError) or error.name is None:
        return None
    names = {name.lower(): name for name in dir(error.obj) if not name.startswith("_")}
    matches = difflib.get_close_matches(error.name.lower(), names, n=1)
    return names[matches[0]] if matches else None


def called(function: Callable[[], Any], where: str, role: str) -> Any:
    """What the user's function returns when it is called without arguments."""
    if not callable(function):
        raise ArgumentError(f"The {role} {where!r} is a {type(function).__name__}; expected a callable.")
    try:
        return function()
    except ErrbarError:
        raise
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"The {role} {where!r} raised {description_with_place(error)}. Expected a callable that needs no arguments."
        ) from error


def description(error: BaseException) -> str:
    """The type and the first line of an error, without a full stop."""
    lines = str(error).strip().splitlines()
    if _IN_WORKER in str(error):
        return lines[-1].strip().rstrip(".")
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def description_with_place(error: BaseException) -> str:
    """The type and the first line of an error, and the line of the user's code where it happened."""
    place = place_in_user_code(error)
    return description(error) if place is None else f"{description(error)} (in {place})"


def place_in_user_code(error: BaseException) -> str | None:
    """The last line on the way to an error that is neither of errbar nor of an installed library, if there is one."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries = [Path(folder).resolve() for folder in folders] + [Path(__file__).resolve().parents[1]]
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if _IN_WORKER in str(error):
        # A process of a DataLoader failed; its traceback comes as a text.
        places += [(name, int(line)) for name, line in re.findall(r'File "([^"]+)", line (\d+)', str(error))]
    for name, line in reversed(places):
        file = Path(name).resolve()
        if file.is_file() and not any(file.is_relative_to(library) for library in libraries):
            return f"line {line} of {name}"
    return None
