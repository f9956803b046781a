"""What only a GPU can show of the backends made for it: their tests on the device, then the speed of their kernels.

``bench/gpu_check.sh [FILE]`` runs it. The whole takes 8 minutes at most: each part has its share, and one that runs out
of time says so in the record in place of what it would have found.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from pocketllm.bench import report
from pocketllm.bench.circumstances import Circumstances
from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.runtimes.devices import DRIVER

BACKENDS = ("triton", "cupy")
TEST_SECONDS = 270
BENCH_SECONDS = {"bfloat16": 100, "float32": 60}
COPY_BYTES = 2**30
COPIES = 9

ROOT = Path(__file__).resolve().parents[2]

# All that have a backend or CUDA C in their name or their file's, but for those of the emulator itself.
_CHOSEN = f"({' or '.join(BACKENDS)} or cuda) and not (cuda_emulator or cuda_faults or cuda_address)"
_TESTS = ("tests/kernels", "tests/runtimes", "-k", _CHOSEN, "-q", "-p", "no:cacheprovider")
# Read by Triton when it is imported: its kernels are compiled, not interpreted.
_ENVIRONMENT = {"TRITON_INTERPRET": "0"}


def main(arguments: Sequence[str]) -> int:
    """Check, and write the record to the file that `arguments` names; 1 where a test fails or does not end."""
    if len(arguments) != 1:
        print("pocketllm: error: give one file to write to, such as gpu_check.json", file=sys.stderr)
        return 2
    file = arguments[0]
    try:
        record = check()
    except PocketLLMError as error:
        print(f"pocketllm: error: {error}", file=sys.stderr)
        return 1
    Path(file).write_text(report.to_json(record), encoding="utf-8")
    tests = record["tests"]
    print(f"{tests.get('passed', 0)} tests passed, {len(tests.get('failed', ()))} failed; {file} has the rest")
    return int(bool(tests.get("failed")) or "stopped" in tests)


def check() -> dict[str, Any]:
    """The record.

    Raises:
        ConfigurationError: there is no GPU that PyTorch and CuPy see.
    """
    device = _device()
    circumstances = Circumstances()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tests = _run_tests(Path(folder) / "tests.xml")
        speed = {dtype: _run_benchmark(dtype, seconds, Path(folder)) for dtype, seconds in BENCH_SECONDS.items()}
    return {
        "benchmark": "gpu_check",
        "circumstances": circumstances.as_dict() | device,
        "tests": tests,
        "copy GB/s": copy_bandwidth(),
        "speed": speed,
        "seconds": round(time.monotonic() - started, 1),
    }


def _device() -> dict[str, Any]:
    for package in ("torch", "cupy", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"the package {package!r} is not installed: install the extras dev and cuda")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ConfigurationError("PyTorch sees no CUDA device; this check is for a machine that has one")
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "driver": _driver_version(),
        "torch CUDA": torch.version.cuda,
    }


def _driver_version(file: Path = DRIVER) -> str:
    """Such as ``580.65.06``; "unknown" where the driver does not tell."""
    if not file.exists():
        return "unknown"
    named = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    return named[0] if named else "unknown"


def _run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None where it ran out of time, and the last of what it printed; nothing that it started is left."""
    settings: Mapping[str, str] = {**os.environ, **_ENVIRONMENT}
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        status: int | None = None
        try:
            output, _ = process.communicate(timeout=seconds)
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return status, output[-4000:]


def _run_tests(junit: Path) -> dict[str, Any]:
    status, output = _run(["-m", "pytest", *_TESTS, "-n", "4", f"--junitxml={junit}"], TEST_SECONDS)
    if status is None or not junit.exists():
        return _stopped(status, TEST_SECONDS, output)
    return outcome_of(junit.read_text(encoding="utf-8"))


def outcome_of(junit: str) -> dict[str, Any]:
    """What pytest's report says: how many tests passed and were skipped, and the failed ones with their messages."""
    failed, passed, skipped = {}, 0, 0
    for case in ElementTree.fromstring(junit).iter("testcase"):
        complaint = next((part for part in case if part.tag in ("failure", "error")), None)
        if complaint is not None:
            failed[f"{case.get('classname')}::{case.get('name')}"] = (complaint.get("message") or "")[:1000]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}


def _run_benchmark(dtype: str, seconds: float, folder: Path) -> Any:
    record = folder / f"ops-{dtype}"
    command = ["-m", "pocketllm.bench", "ops", "--backend", ",".join(BACKENDS), "--device", "cuda", "--dtype", dtype]
    status, output = _run([*command, "--repeat", "3", "--out", str(record)], seconds)
    written = record.with_suffix(".json")
    if status == 0 and written.exists():
        return json.loads(written.read_text(encoding="utf-8"))["ops"]
    return _stopped(status, seconds, output)


def _stopped(status: int | None, seconds: float, output: str) -> dict[str, Any]:
    return {"stopped": f"no end within {seconds} s" if status is None else f"status {status}", "output": output}


def copy_bandwidth() -> float:
    """GB/s that a copy within the device's memory reads and writes together."""
    torch = importlib.import_module("torch")
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    readings: list[float] = []
    for _ in range(COPIES):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        readings.append(2 * COPY_BYTES / (start.elapsed_time(end) * 1e6))
    return round(median(readings), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
