"""``pocketllm kernels`` as a researcher uses it: look, change, check, time."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pocketllm.bench import limits, ops, speed
from pocketllm.cli.main import main
from pocketllm.kernels.registry import implementation, op_names
from tests.bench.fakes import FakeRemote, ascending
from tests.cli.running import error_of, run_cli


def broken_copy(folder: Path) -> Path:
    """Torch's norm with twice the epsilon, in a file of its own."""
    source = Path(str(implementation("rms_norm", "torch").__file__)).read_text()
    assert "+ eps)" in source
    path = folder / "my_norm.py"
    path.write_text(source.replace("+ eps)", "+ 2 * eps)"))
    return path


def test_every_op_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [op["op"] for op in listed] == list(op_names())
    assert main(["kernels", "list"]) == 0
    table = capsys.readouterr().out
    assert all(f"\n {op['op']} " in table for op in listed)
    assert "composed" in table


def test_one_op_is_listed_with_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "rms_norm"]) == 0
    text = capsys.readouterr().out
    for part in ("eps: float, weight_offset: float = 0.0", "kernels/rms_norm/impl_torch.py", "residual", "... x n"):
        assert part in text
    assert main(["kernels", "list", "rms_norm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timed at"][0]["dims"] == {"rows": 1, "heads": 0, "n": 576}


def test_sound_implementations_are_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "check", "rms_norm", "mlp", "kv_write", "--backend", "torch", "--cases", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["rms_norm", "torch", "float32"],
        ["rms_norm", "torch", "bfloat16"],
        ["mlp", "torch", "float32"],
        ["mlp", "torch", "bfloat16"],
        ["kv_write", "torch", "float32"],
        ["kv_write", "torch", "bfloat16"],
        ["kv_write", "torch", "float32-cache_float16"],
    ]
    assert all("ok: 6 cases" in line for line in lines)
    assert "of its bound" in lines[0]


def test_a_broken_one_is_shown_with_the_command_that_repeats_it(tmp_path: Path) -> None:
    path = broken_copy(tmp_path)
    done = run_cli("kernels", "check", "rms_norm", "--backend", "torch", "--dtype", "float32", "--file", str(path))
    assert (done.returncode, done.stderr) == (1, "")
    verdict, complaint, again = done.stdout.splitlines()
    assert "WRONG" in verdict
    assert complaint.strip().startswith("rms_norm: out is off in ")
    words = shlex.split(again.strip().removeprefix("again: pocketllm "))
    repeated = run_cli(*words)
    assert repeated.returncode == 1
    assert repeated.stdout.splitlines()[1:] == [complaint, again]


def test_the_same_file_unchanged_is_right(tmp_path: Path) -> None:
    path = tmp_path / "same.py"
    path.write_text(Path(str(implementation("rms_norm", "torch").__file__)).read_text())
    done = run_cli("kernels", "check", "rms_norm", "--backend", "torch", "--cases", "9", "--file", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("ok: 9 cases") == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["check", "rms_nrm"], 2, "there is no op 'rms_nrm': did you mean 'rms_norm'?"),
        (["list", "rms_nrm"], 2, "there is no op 'rms_nrm'"),
        (["check", "--backend", "abacus"], 1, "there is no backend 'abacus' to check"),
        (["check", "add", "--backend", "torch", "--dtype", "int4"], 2, "dtype is 'int4': torch has float32, bfloat16"),
        (["check", "add", "--dtype", "int4"], 2, "dtype is 'int4': cupy or numba or torch"),
        (["check", "add", "--cases", "-1"], 2, "'-1': give a whole number"),
        (["check", "add", "--cases", "0"], 2, "'0': give a whole number from 1"),
        (["check", "add", "--cases", "3", "--case", "1"], 2, "argument --case: not allowed with argument --cases"),
        (["check", "--file", "x.py"], 2, "--file is an implementation of one op for one backend"),
        (["check", "add", "--backend", "torch", "--file", "nowhere.py"], 2, "nowhere.py is no Python file"),
        (["bench", "rms_nrm"], 2, "there is no op 'rms_nrm'"),
        (["bench", "--backend", "abacus"], 2, "'abacus' is no backend"),
        (["bench", "--backend", "numba", "--device", "cuda"], 2, "there is nothing to time here: numba: "),
        (["report", "sample_not"], 2, "there is no op 'sample_not'"),
        ([], 2, "the following arguments are required: ACTION"),
    ],
)
def test_what_cannot_be_done(arguments: list[str], status: int, message: str, capsys: Any) -> None:
    try:
        found = main(["kernels", *arguments])
    except SystemExit as end:
        found = int(str(end.code))
    done = subprocess.CompletedProcess("kernels", found, *capsys.readouterr())
    assert message in error_of(done, status)


def test_a_file_that_is_no_implementation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "half.py"
    path.write_text("def supports(call):\n    return None\n")
    assert main(["kernels", "check", "add", "--backend", "torch", "--file", str(path)]) == 2
    assert "which has no bind: give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import math\n\nraise ValueError('boo')\n", "mine.py does not import: ValueError: boo, line 3"),
        ("import sys\nsys.exit(0)\n", "mine.py does not import: SystemExit: 0, line 2"),
        ("x = (\n", "mine.py does not import: SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import surely_not_installed\n", "mine.py does not import: ModuleNotFoundError: No module named"),
        ("supports = bind = 1\n", "which has no supports and no bind"),
    ],
    ids=["raises", "exits", "syntax", "missing", "no functions"],
)
def test_a_file_that_does_not_import(source: str, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    status = main(["kernels", "check", "add", "--backend", "torch", "--file", str(path)])
    done = subprocess.CompletedProcess("kernels", status, *capsys.readouterr())
    assert message in error_of(done, 2)


def test_a_file_imports_what_lies_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside_my_sum.py").write_text("from pocketllm.kernels.add.impl_torch import bind, supports\n")
    path = tmp_path / "my_sum.py"
    path.write_text("from beside_my_sum import bind, supports\n")
    before = list(sys.path)
    command = ["kernels", "check", "add", "--backend", "torch", "--dtype", "float32", "--file", str(path)]
    assert main([*command, "--cases", "1"]) == 0
    assert "ok: 1 case, " in capsys.readouterr().out
    assert sys.path == before


def test_a_kernel_that_ends_the_program_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "exits.py"
    path.write_text(
        "import sys\n\ndef supports(call):\n    pass\n\ndef bind(call):\n    return lambda **_: sys.exit(0)\n"
    )
    assert main(["kernels", "check", "add", "--backend", "torch", "--file", str(path)]) == 1
    assert "add ends with SystemExit: 0" in capsys.readouterr().out


def test_an_op_is_checked_once_and_emulators_on_less(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "check", "add", "add", "--backend", "cupy", "--dtype", "float32", "--cases", "4"]) == 0
    told, verdict = capsys.readouterr().out.splitlines()
    assert told.split(maxsplit=1) == ["cupy", "on sizes to 600: its kernels run in the CUDA emulator"]
    assert verdict.split()[:4] == ["add", "cupy", "float32", "ok:"]


def test_no_standard_output_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["kernels", "list"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_nothing_to_check_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "check", "quantized_linear", "--backend", "torch"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was checked"


def test_figures_of_the_timed_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "start", lambda threads: FakeRemote(ascending, []))
    monkeypatch.setattr(speed, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(ops, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(ops, "RUN_SECONDS", 0)
    stem = tmp_path / "ops"
    command = ["kernels", "bench", "swiglu", "quantized_linear", "--repeat", "1", "--out", str(stem)]
    assert main(command) == 0
    record = json.loads(stem.with_suffix(".json").read_text())
    assert record["benchmark"] == "ops"
    assert record["limits"]["read"]["median"] == 10.0
    assert "triton" in record["skipped"]
    for op, able in (("swiglu", {"torch", "numba"}), ("quantized_linear", {"numba"})):
        for shape in record["ops"][op]:
            assert shape["backends"].keys() == able
            for figures in shape["backends"].values():
                seconds = figures["us"]["median"] / 1e6
                assert figures["GB/s"] == pytest.approx(shape["bytes"] / seconds / 1e9, rel=1e-2)
                assert figures["GFLOP/s"] == pytest.approx(shape["operations"] / seconds / 1e9, rel=1e-2)
    page = capsys.readouterr().out
    assert page == stem.with_suffix(".md").read_text()
    assert main(["bench", "show", str(stem.with_suffix(".json"))]) == 0
    assert capsys.readouterr().out == page


def test_a_file_is_timed_beside_its_backend_if_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "start", lambda threads: FakeRemote(ascending, []))
    monkeypatch.setattr(ops, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(ops, "RUN_SECONDS", 0)
    same = tmp_path / "same.py"
    same.write_text(Path(str(implementation("rms_norm", "torch").__file__)).read_text())
    command = ["kernels", "bench", "rms_norm", "--backend", "torch", "--repeat", "1", "--json", "--file"]
    assert main([*command, str(same)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert all(shape["backends"].keys() == {"torch", str(same)} for shape in record["ops"]["rms_norm"])
    assert main([*command, str(broken_copy(tmp_path))]) == 1
    assert "an override does not do what the contract says: rms_norm: out is off" in capsys.readouterr().err
    assert main(["kernels", "bench", "--backend", "torch", "--file", str(same)]) == 2
    assert "name the op and --backend" in capsys.readouterr().err


def test_resources_of_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET" not in os.environ
    done = run_cli("kernels", "report", "add", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)["kernels"]
    assert {(row["backend"], row["kernel"], row["architecture"]) for row in rows} == {
        *(("triton", "add:_add", name) for name in ("sm_80", "sm_90")),
        *(("cupy", "add:add", name) for name in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")),
    }
    assert all(row["spilled"] == 0 < row["registers"] for row in rows)


def test_a_process_that_interprets_compiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "report", "add"]) == 1
    assert "start anew without TRITON_INTERPRET" in capsys.readouterr().err
    assert main(["kernels", "report", "mlp"]) == 2
    assert "op 'mlp' has no kernel of triton or cupy" in capsys.readouterr().err
