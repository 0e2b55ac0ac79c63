"""Optional dependencies: imported when they are needed, with a sentence that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from errbar.errors import MissingExtraError, how_to_install


def extra(module: str, purpose: str, package: str, name: str) -> Any:
    """An optional dependency, or a sentence that says which extra has it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MissingExtraError(
            f"{purpose} needs {package}, which is not installed: {how_to_install(name)}."
        ) from missing
