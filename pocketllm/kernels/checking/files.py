"""Implementations that lie in a file of their own, outside this package."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from pocketllm.errors import ConfigurationError


def implementation_in(file: str) -> ModuleType:
    """The module in a Python file, imported; it finds other modules that lie beside it.

    Raises:
        ConfigurationError: there is no such file, or it does not import.
    """
    path = Path(file).resolve()
    found = importlib.util.spec_from_file_location(f"{path.stem}_from_file", path)
    if found is None or found.loader is None or not path.is_file():
        raise ConfigurationError(f"{file} is no Python file: give a path that ends in .py")
    module = importlib.util.module_from_spec(found)
    # What looks a module up by its name, as dataclasses do, finds it.
    sys.modules[found.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[found.name]
        raise ConfigurationError(
            f"{file} does not import: {type(error).__name__}: {error}{_line(error, path)}"
        ) from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it happened, as the end of a message."""
    if isinstance(error, SyntaxError):
        return ""  # it says so itself
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""
