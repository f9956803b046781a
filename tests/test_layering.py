"""Imports point down only, stand at the top of their modules and form no circle; read from the sources."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pocketllm
import pocketllm.kernels

PACKAGE = Path(pocketllm.__file__).parent
BASE = {"types", "errors"}

# What the modules of each part may import besides their own part. A part is a folder of the package or a module in it;
# "" is the package's own __init__.
ALLOWED = {
    "errors": set[str](),
    "types": {"display"},
    "display": {"types"},
    "progress": {"types"},
    "env": {"errors"},
    "config": {"errors", "env"},
    "checkpoint": {"errors", "types", "env"},
    # Where compiled code is kept; quantised tensors in the formats of a checkpoint.
    "kernels": {"errors", "env", "checkpoint.quant"},
    "models": {"errors", "types", "kernels.contract"},
    "runtimes": {"errors", "types", "models", "kernels", "checkpoint"},
    "engine": {*BASE, "env", "config", "runtimes", "checkpoint", "models.family", "kernels.overriding"},
    "protocol": BASE,
    "server": {*BASE, "env", "config", "protocol", "engine"},
    "llm": {*BASE, "env", "config", "protocol", "engine", "progress"},
    "async_llm": {*BASE, "env", "config", "protocol", "engine", "llm", "progress"},
    "bench": {*BASE, "env", "config", "engine", "llm", "kernels", "runtimes", "models", "checkpoint"},
    "cli": {*BASE, "env", "config", "protocol", "engine", "llm", "server", "checkpoint.store", "bench", "kernels", ""},
    "__main__": {"cli"},
    "": {*BASE, "config", "llm", "async_llm"},
}

# Imports inside functions: commands import what they run with, so that `pocketllm --help` stays quick.
LAZY = {
    "__main__": {"run"},  # or ctrl-C while they load would show a traceback
    "cli.serve": {"run"},
    "cli.generate": {"run"},
    "cli.chat": {"run"},
    "cli.models": {"model_store", "_pull"},
    "cli.inspect": {"run"},
    "cli.bench": {"add_arguments"},
    "cli.kernels": {"_list", "_check", "_add_bench_arguments", "_bench", "_add_report_arguments", "_report"},
    "cli.completion": {"run"},
}


@dataclass(frozen=True)
class Import:
    """One import of a module of this package, by names without the package's own."""

    importer: str
    imported: str
    line: int
    function: str | None
    for_types: bool

    def __str__(self) -> str:
        where = f"{self.importer or '__init__'}:{self.line}"
        return f"{where} imports {self.imported or 'pocketllm'}" + (f" inside {self.function}" if self.function else "")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


class Reader(ast.NodeVisitor):
    """Collects a module's imports of this package, and all imports inside functions."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.ours: list[Import] = []
        self.inside: list[tuple[str, int]] = []
        self._function: str | None = None
        self._for_types = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._function = self._function, self._function or node.name
        self.generic_visit(node)
        self._function = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        outer = self._for_types
        self._for_types = outer or ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.body:
            self.visit(child)
        self._for_types = outer
        for child in node.orelse:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, f"{self.module}:{node.lineno}: imports in the package are absolute"
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            self._add(submodule if submodule.removeprefix("pocketllm.") in SOURCES else str(node.module), node.lineno)

    def _add(self, name: str, line: int) -> None:
        if self._function is not None:
            self.inside.append((self._function, line))
        if name.partition(".")[0] == "pocketllm":
            imported = name.removeprefix("pocketllm").removeprefix(".")
            self.ours.append(Import(self.module, imported, line, self._function, self._for_types))


def read(module: str) -> Reader:
    reader = Reader(module)
    reader.visit(ast.parse(SOURCES[module].read_text(encoding="utf-8")))
    return reader


READERS = {module: read(module) for module in SOURCES}


def is_allowed(found: Import) -> bool:
    part = found.importer.partition(".")[0]
    names = found.imported.split(".")
    holders = {".".join(names[:length]) for length in range(1, len(names) + 1)}
    return names[0] == part or not holders.isdisjoint(ALLOWED[part])


def test_every_part_of_the_package_has_its_place() -> None:
    assert {module.partition(".")[0] for module in SOURCES} <= set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_point_down(part: str) -> None:
    found = [i for module, reader in READERS.items() if module.partition(".")[0] == part for i in reader.ours]
    assert [str(i) for i in found if not is_allowed(i)] == []


def test_imports_stand_at_the_top() -> None:
    found = [
        f"{module}:{line} inside {function}"
        for module, reader in READERS.items()
        for function, line in reader.inside
        if function not in LAZY.get(module, set())
    ]
    assert found == []


def test_every_lazy_place_is_one() -> None:
    for module, functions in LAZY.items():
        assert functions <= {function for function, _ in READERS[module].inside}, module


def test_no_circle() -> None:
    graph = {
        module: {i.imported for i in reader.ours if not i.for_types and i.function is None and i.imported != module}
        for module, reader in READERS.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(name or "pocketllm" for name in error.args[1]))


def test_the_kernels_package_says_little() -> None:
    """Other libraries look for a package called kernels; what they would find here must look like none.

    It imports nothing of ours, has no version, and one name arrives when it is asked for.
    """
    body = ast.parse(SOURCES["kernels"].read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    rest = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
    assert {ast.unparse(node) for node in imports} == {
        "from __future__ import annotations",
        "import importlib",
        "from typing import Any",
    }
    assert [node.name for node in rest if isinstance(node, ast.FunctionDef)] == ["__getattr__"]
    assert len(rest) == 1
    with pytest.raises(AttributeError):
        _ = pocketllm.kernels.get_kernel
    assert callable(pocketllm.kernels.override)
