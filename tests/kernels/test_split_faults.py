"""Products whose split of K depends on the number of rows: every bound is kept, so equal bits alone find them.

Numba's are in `test_numba_bits`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.cases import check_cases, drawn_cases
from pocketllm.kernels.registry import implementation, spec

# What decides how K is split, by backend: the file, the sound text and the broken one.
FAULTS = {
    "triton": (".py", "BK=tile.depth,", "BK=tile.depth if rows == 1 else tile.depth // 2,"),
    "cupy": (
        ".cu",
        "sums[i][j] = fmaf(down[i], across[j], sums[i][j]);",
        "totals[i][j] = fmaf(down[i], across[j], totals[i][j]);",
    ),
}
ROWS, OUTPUTS, COLUMNS = 11, 10, 70
EVERY_BACKEND = pytest.mark.parametrize("name", FAULTS)


Load = Callable[..., ModuleType]


@pytest.fixture
def linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """From a backend to its implementation, loaded from a copy of the sources, `broken` or not."""
    return lambda name, *, broken: copied(name, broken, tmp_path, monkeypatch)


def copied(name: str, broken: bool, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    suffix, sound, fault = FAULTS[name]
    original = Path(str(implementation("linear", name).__file__))
    for source in {original, original.with_suffix(suffix)}:
        text = source.read_text(encoding="utf-8")
        if broken and source.suffix == suffix:
            assert text.count(sound) == 1
            text = text.replace(sound, fault)
        (folder / source.name).write_text(text, encoding="utf-8")
    found = importlib.util.spec_from_file_location(f"linear_of_{name}", folder / original.name)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    patch.setitem(sys.modules, found.name, module)
    found.loader.exec_module(module)
    return module


def rows_stand_alone(name: str, module: ModuleType) -> bool:
    """Whether each row of a product is the same bits alone and among others."""
    rng, on = np.random.default_rng(3), backend(name)
    weight, x = (rng.standard_normal((lines, COLUMNS)).astype(np.float32) for lines in (OUTPUTS, ROWS))
    op = on.table(FLOAT32, {"linear": module}).bind("linear", {"weight": on.put(weight, "float32")})
    together, *alone = (on.get(op(on.put(part, "float32"))) for part in (x, *np.split(x, ROWS)))
    return np.array_equal(together, np.concatenate(alone))


@EVERY_BACKEND
def test_a_split_that_depends_on_the_rows_is_found(name: str, linear: Load) -> None:
    assert not rows_stand_alone(name, linear(name, broken=True))


@EVERY_BACKEND
def test_a_sound_product_is_not_accused(name: str, linear: Load) -> None:
    assert rows_stand_alone(name, linear(name, broken=False))


@EVERY_BACKEND
def test_no_bound_finds_it(name: str, linear: Load) -> None:
    report = check_cases(
        "linear",
        backend(name),
        FLOAT32,
        drawn_cases(spec("linear"), 0, range(8)),
        override=linear(name, broken=True),
    )
    assert report.agreed > 0
    assert report.failure is None
