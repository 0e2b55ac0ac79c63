"""The package is imported with the shapes in its annotations checked at every call."""

from __future__ import annotations

import sys

from jaxtyping import install_import_hook

assert "errbar" not in sys.modules, "errbar was imported before its shapes could be checked"

with install_import_hook("errbar", "shapes.check_shapes"):
    import errbar  # noqa: F401
