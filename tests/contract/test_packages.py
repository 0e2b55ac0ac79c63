"""The order of the packages, the doors between them, and what holds for every module of them."""

from __future__ import annotations

import ast
import builtins
import dis
import types
from collections.abc import Iterator

import pytest

from places import ROOT
from source_tree import MODULES, imports, syntax

# From the bottom to the top: a package, or a module beside them, imports only from those above it in this list.
PACKAGES = [
    "version",
    "errors",
    "_base",
    "_model",
    "metrics",
    "_distributed",
    "_distributions",
    "_derivative",
    "_curvature",
    "_planning",
    "_posterior",
    "_files",
    "_export",
    "_calibration",
    "_choosing",
    "_fusion",
    "_deciding",
    "_monitor",
    "plots",
    "report",
    "sklearn",
    "lightning",
    "experiments",
    "demo",
    "serve",
    "cli",
    "__main__",
]

# Where a value has a method that belongs to a higher package, that is imported inside the method. There are no others.
DOORS = {
    ("_posterior.collect", "_files.checkpoint"),
    ("_posterior.information", "_files.save"),
    ("_posterior.posterior", "_files.save"),
    ("_posterior.posterior", "_export.write"),
    ("_files.load", "_fusion.fused"),
    ("_files.load", "_fusion.table"),
}

# A structure in two files: the second is a form of the first, or its linear algebra.
PARTS_OF_A_STRUCTURE = {"_curvature.per_class": "_curvature.dense", "_curvature.eigenbasis": "_curvature.kronecker"}


def package_of(module: str) -> str:
    return module.split(".")[0]


# ------------------------------------------------------------------------------------------------- order and doors


def test_every_package_has_its_place_in_the_order() -> None:
    assert {package_of(name) for name in MODULES if name} == set(PACKAGES)


def test_packages_import_only_from_those_below_them() -> None:
    upwards = {
        (name, other)
        for name in MODULES
        if name
        for other in imports(name)
        if other in MODULES and other and PACKAGES.index(package_of(other)) > PACKAGES.index(package_of(name))
    }
    assert upwards == DOORS


def test_doors_are_inside_functions() -> None:
    for name, other in DOORS:
        modules = {node.module for node in syntax(name).body if isinstance(node, ast.ImportFrom)}
        assert f"errbar.{other}" not in modules


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name: {other for other in imports(name) if other in MODULES and (name, other) not in DOORS} for name in MODULES
    }
    # The package itself gathers the public names, and every package its own.
    graph = {name: others - {""} for name, others in graph.items() if MODULES[name].name != "__init__.py"}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way, name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


# ------------------------------------------------------------------------------------------------- every module


def test_the_tree_in_contributing_is_the_tree_on_disk() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("```text\n")[1].split("```")[0]
    shown: dict[str, set[str]] = {}
    package = ""
    for line in tree.splitlines():
        package = line[:18].strip() or package
        if package.endswith("/"):
            shown.setdefault(package[:-1], set()).update(name for name in line[18:].replace(",", " ").split())
    there: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if "." in name and path.name != "__init__.py":
            there.setdefault(package_of(name), set()).add(name.partition(".")[2])
    assert shown == there


def test_the_first_line_of_every_module_says_what_it_is() -> None:
    for name in MODULES:
        docstring = ast.get_docstring(syntax(name))
        assert docstring, name
        assert docstring.splitlines()[0].endswith("."), f"{name}: the sentence goes on in the second line"


def test_only_one_module_calls_torch_linalg() -> None:
    for name in MODULES:
        uses = [
            node.lineno
            for node in ast.walk(syntax(name))
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "linalg"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            )
            or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.linalg"))
        ]
        assert not uses or name == "_base.linalg", f"{name}, lines {uses}"


# ------------------------------------------------------------------------------------------------- structures


def structure_of(module: str) -> str:
    return PARTS_OF_A_STRUCTURE.get(module, module)


def structure_classes() -> dict[str, str]:
    """The sums, factors, accumulators and structures of `_curvature`, and the structure that each belongs to."""
    endings = ("Sum", "Factor", "Accumulator", "Structure")
    return {
        node.name: structure_of(module)
        for module in MODULES
        if package_of(module) == "_curvature"
        for node in syntax(module).body
        if isinstance(node, ast.ClassDef) and node.name.endswith(endings)
    }


def checked_classes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each class that `isinstance`, `issubclass`, `type(…) is` or a pattern of `match` asks for."""
    for node in ast.walk(tree):
        kinds: list[ast.AST] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            kinds = [*node.args[1:]] if node.func.id in ("isinstance", "issubclass") else []
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left):
            kinds = [*node.comparators]
        elif isinstance(node, ast.MatchClass):
            kinds = [node.cls]
        for part in (part for kind in kinds for part in ast.walk(kind)):
            if isinstance(part, ast.Name):
                yield node.lineno, part.id
            elif isinstance(part, ast.Attribute):
                yield node.lineno, part.attr


def test_a_structure_is_asked_what_it_is_in_its_own_file_only() -> None:
    classes = structure_classes()
    assert len(classes) > 20
    elsewhere = [
        f"{module}, line {line}: {name}"
        for module in MODULES
        for line, name in checked_classes(syntax(module))
        if name in classes and classes[name] != structure_of(module)
    ]
    assert elsewhere == []


def test_such_a_question_would_be_seen() -> None:
    questions = """
isinstance(total, DenseSum)
isinstance(total, (int, block.BlockSum))
issubclass(kind, DiagonalFactor)
type(total) is KroneckerSum
match total:
    case LowRankSum(): pass
"""
    asked = {name for _, name in checked_classes(ast.parse(questions))}
    assert {"DenseSum", "BlockSum", "DiagonalFactor", "KroneckerSum", "LowRankSum"} <= asked & set(structure_classes())


def code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_objects(constant)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "__main__")])
def test_every_global_name_is_defined(name: str) -> None:
    """Linters cannot tell: the shapes in annotations look like undefined names to them."""
    module = pytest.importorskip(f"errbar.{name}", exc_type=ImportError)
    source = MODULES[name].read_text(encoding="utf-8")
    names = {
        instruction.argval
        for code in code_objects(compile(source, name, "exec"))
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    assert sorted(name for name in names if name not in vars(module) and not hasattr(builtins, name)) == []
