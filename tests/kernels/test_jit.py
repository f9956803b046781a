"""The life cycle of compiled kernels: keys, the folder they are kept in, builds and what can go wrong with each."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types

from pocketllm.kernels.jit import sources, store
from pocketllm.kernels.jit.builds import BuildQueue
from pocketllm.kernels.jit.sources import digest, python_sources
from pocketllm.kernels.jit.store import kernel_folder
from pocketllm.kernels.jit.toolchain_numba import Kernel, array, readonly

ADD = """
import json
import numpy as np
from pocketllm.kernels.registry import BackendOpTable
from pocketllm.kernels.jit.builds import QUEUE
add = BackendOpTable("numba", device="cpu", dtype="float32").bind("add")
report = QUEUE.build_all(lambda *_: None)
x = np.ones((2, 3), np.float32)
add(x, x.copy())
assert (x == 2).all()
print(json.dumps([report.compiled, report.loaded]))
"""


def start(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    variables = {**os.environ, "POCKETLLM_CACHE_DIR": str(cache), **environment}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], env=variables, cwd="/", text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> list[int]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_kernel_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    assert finish(start(ADD, tmp_path)) == [1, 0]
    assert finish(start(ADD, tmp_path)) == [0, 1]


def test_processes_that_start_together_on_an_empty_cache_all_start(tmp_path: Path) -> None:
    reports = [finish(process) for process in [start(ADD, tmp_path) for _ in range(3)]]
    assert sorted(reports) == [[0, 1], [0, 1], [1, 0]]  # one builds, under the lock; the others find it built


def test_a_folder_that_cannot_be_written_means_one_warning_and_no_cache(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    code = "import logging; logging.basicConfig()\n" + ADD.replace(
        '"add")', '"add")\nops.bind("take_rows")', 1
    ).replace(
        'add = BackendOpTable("numba", device="cpu", dtype="float32")',
        'ops = BackendOpTable("numba", device="cpu", dtype="float32")\nadd = ops',
    )
    process = start(code, blocked, HOME="/nonexistent")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) == [2, 0]
    assert err.count("compiled kernels cannot be kept below") == 1
    assert "Set POCKETLLM_CACHE_DIR to a folder of your own" in err


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(store.os, "getuid", lambda: 12345)
    with caplog.at_level(logging.WARNING):
        assert kernel_folder(tmp_path, "numba", "key") is None
        assert kernel_folder(tmp_path, "numba", "key") is None
    assert len(caplog.records) == 1
    assert "belongs to another user" in caplog.text


def test_a_key_follows_every_source_that_a_kernel_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FOLDER", tmp_path)
    (tmp_path / "op").mkdir()
    files = {
        "op/kernel.py": "from pocketllm.kernels import simd\nimport numpy\n",
        "simd.py": "from pocketllm.kernels.parts import lanes\n",
        "parts.py": "lanes = 8\n",
        "stranger.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def key(*facts: str) -> str:
        python_sources.cache_clear()
        return digest(python_sources("pocketllm.kernels.op.kernel"), *facts)

    before = key("flags", "cpu")
    assert key("flags", "cpu") == before
    (tmp_path / "stranger.py").write_text("changed = 1\n")
    assert key("flags", "cpu") == before
    (tmp_path / "parts.py").write_text("lanes = 16\n")
    after = key("flags", "cpu")
    assert after != before
    assert len({after, key("flags", "other cpu"), key("other flags", "cpu"), key("flagscpu")}) == 4
    python_sources.cache_clear()


def test_a_kernels_own_includes_are_found() -> None:
    names = {path.name for path in python_sources("pocketllm.kernels.quantized_linear.impl_numba")}
    assert {"impl_numba.py", "activations_numba.py", "int8_numba.py", "simd_numba.py", "toolchain_numba.py"} <= names


def _double(x: Any, out: Any) -> None:
    for index in range(len(x)):
        out[index] = 2 * x[index]


def test_arguments_of_other_types_are_refused_and_compile_nothing() -> None:
    kernel = Kernel(_double, readonly(types.float32, 1), array(types.float32, 1))
    x = np.ones(3, dtype=np.float32)
    x.flags.writeable = False
    out = np.empty(3, dtype=np.float32)
    kernel(x, out)
    assert (out == 2).all()
    for wrong in (x.astype(np.float64), x.reshape(1, 3), np.ones(6, np.float32)[::2]):
        with pytest.raises(TypeError, match="No matching definition"):
            kernel(wrong, out)
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(out, x)  # what it writes must be writable


class _Buildable:
    def __init__(self, name: str, cached: bool) -> None:
        self.name, self.cached, self.built = name, cached, False

    def build(self) -> bool:
        self.built = True
        return self.cached


def test_the_queue_builds_each_kernel_once_and_tells_its_progress() -> None:
    queue, seen = BuildQueue(), []
    first, second = _Buildable("first", cached=False), _Buildable("second", cached=True)
    for kernel in (first, second, first):
        queue.request(kernel)
    report = queue.build_all(lambda *progress: seen.append(progress))
    assert seen == [("kernels", 0, 2), ("kernels", 1, 2), ("kernels", 2, 2)]
    assert (report.compiled, report.loaded) == (1, 1)
    assert first.built
    assert second.built
    queue.request(first)
    assert queue.build_all(lambda *_: None).compiled == 0


def test_the_kernels_package_imports_no_numba() -> None:
    code = "import sys; import pocketllm.kernels, pocketllm.kernels.registry; print(int('numba' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert done.stdout.strip() == "0"
