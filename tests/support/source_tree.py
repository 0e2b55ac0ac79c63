"""The modules of the package as files, and what each of them imports."""

from __future__ import annotations

import ast
from pathlib import Path

import errbar

SOURCE = Path(errbar.__file__).parent


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Without "errbar." in front; the package itself is "".
MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def syntax(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, wherever in its file."""
    modules = set()
    for node in ast.walk(syntax(module)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            parent = node.module or ""
            members = [f"{parent}.{alias.name}" for alias in node.names]
            submodules = [name for name in members if name.removeprefix("errbar.") in MODULES]
            names = submodules if len(submodules) == len(members) else [parent, *submodules]
        modules.update(name.partition(".")[2] for name in names if name.split(".")[0] == "errbar")
    return modules
