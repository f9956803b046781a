"""What a kernel is compiled from: its own source file and every file of this package that it includes."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_PACKAGE = "pocketllm.kernels"
_FOLDER = Path(__file__).resolve().parent.parent


@cache
def python_sources(module: str) -> tuple[Path, ...]:
    """The file of a module of the kernels, and those of the kernels' modules that it imports, directly or not."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if name in found or path is None:
            continue
        found[name] = path
        waiting.extend(_imported(path))
    return tuple(sorted(found.values()))


def _file_of(module: str) -> Path | None:
    if not module.startswith(f"{_PACKAGE}."):
        return None
    path = _FOLDER.joinpath(*module.removeprefix(f"{_PACKAGE}.").split(".")).with_suffix(".py")
    return path if path.is_file() else None


def _imported(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def digest(sources: Iterable[Path], *facts: str) -> str:
    """A key, 20 hexadecimal digits, of the contents of `sources` and of everything else that the code depends on."""
    hashed = hashlib.sha256()
    for path in sources:
        hashed.update(f"{path.name}\0".encode())
        hashed.update(path.read_bytes())
    for fact in facts:
        hashed.update(f"\0{fact}".encode())
    return hashed.hexdigest()[:20]
