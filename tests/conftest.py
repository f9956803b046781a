"""What holds for every test: where modules come from, what is left behind, and where the caches are."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import hypothesis
import pytest

from pocketllm import env
from pocketllm.checkpoint.store import ModelStore
from pocketllm.kernels.jit.cuda_emulator.settings import Build, emulated

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 5.0

# `kernels`, `runtimes` and `bench` at the top are links for people. As bare modules they would stand in for packages
# of the same names that other libraries look for.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# Read by its owner at import: no test goes to a network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Read by Triton at import, which other libraries cause too: its kernels run in its interpreter, on any machine. To run
# them on a GPU, set it to 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile(
    "pocketllm",
    deadline=None,
    database=None,
    max_examples=50,
    derandomize="CI" in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("pocketllm")

USERS_CACHE = os.environ.get(env.CACHE_DIR.name)
_CACHE_NUMBERS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How kernels in CUDA C are emulated; see `pocketllm.kernels.jit.cuda_emulator.settings.Emulation`."""
    group = parser.getgroup("CUDA emulator")
    group.addoption("--emulator", choices=get_args(Build), default="plain", help="which build of the emulator")
    group.addoption("--emulator-seed", type=int, default=0, help="shuffles the order of lanes; 0 is their own")


@pytest.fixture(autouse=True, scope="session")
def _emulator(pytestconfig: pytest.Config) -> Iterator[None]:
    """Where no test says otherwise, kernels are emulated as the command line says."""
    with emulated(pytestconfig.getoption("--emulator"), pytestconfig.getoption("--emulator-seed")):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests on the real model come last: what the others find is found sooner.

    The longest come first where several processes share the tests out, so that these end together.
    """

    def turn(item: pytest.Item) -> int:
        if ROOT / "tests" / "e2e" in item.path.parents:
            return 1
        return -1 if "PYTEST_XDIST_WORKER" in os.environ and item.path.name == "test_conformance.py" else 0

    items.sort(key=turn)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct in the user's own cache, pulled when it is absent."""
    with pytest.MonkeyPatch.context() as patch:
        _use_cache(patch, USERS_CACHE)
        return ModelStore(env.CACHE_DIR.read()).pull("smollm2")


@pytest.fixture(autouse=True)
def _environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the user's reaches a test, and each has its own cache unless it runs the real model."""
    own_cache = str(tmp_path_factory.getbasetemp() / "caches" / f"{next(_CACHE_NUMBERS)}")
    with pytest.MonkeyPatch.context() as patch:
        for variable in env.VARIABLES:
            patch.delenv(variable.name, raising=False)
        _use_cache(patch, USERS_CACHE if "real_model" in request.fixturenames else own_cache)
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a thread of ours, a thread that would keep the process alive, or a child process."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := _left(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"the test leaves behind: {', '.join(left)}"


def _use_cache(patch: pytest.MonkeyPatch, directory: str | None) -> None:
    if directory is None:
        patch.delenv(env.CACHE_DIR.name, raising=False)
    else:
        patch.setenv(env.CACHE_DIR.name, directory)


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    new = set(threading.enumerate()) - threads
    names = [thread.name for thread in new if thread.name.startswith("pocketllm-") or not thread.daemon]
    return sorted(names) + [f"process {child} ({_command(child)})" for child in sorted(_children() - children)]


def _children() -> set[int]:
    """This process's children, where the system tells; multiprocessing's own tracker lives as long as the process."""
    listed = [_read(path).split() for path in Path("/proc/self/task").glob("*/children")]
    return {int(child) for group in listed for child in group if "resource_tracker" not in _command(int(child))}


def _command(process: int) -> str:
    return _read(Path(f"/proc/{process}/cmdline")).replace("\0", " ").strip()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread or process has ended
        return ""
