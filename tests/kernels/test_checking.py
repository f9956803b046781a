"""Checking an implementation: which cases are drawn, and what is said about one that is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, backend, backend_names
from pocketllm.kernels.checking.cases import (
    WIDEST_EMULATED,
    CheckReport,
    check_cases,
    corners,
    drawn_cases,
    whole_sizes,
    wide_sizes,
)
from pocketllm.kernels.checking.comparison import plain
from pocketllm.kernels.checking.discovery import modes_of, obstacle, parts_of
from pocketllm.kernels.checking.inventory import contract_facts, op_facts
from pocketllm.kernels.contract import Case
from pocketllm.kernels.overriding import CASES
from pocketllm.kernels.registry import check_op_names, implementation, imported, op_names, spec

TORCH = backend("torch")


def flat(case: Case) -> list[Any]:
    arrays = [plain(array).tolist() for part in (case.weights, case.arrays) for array in part.values()]
    return [repr(case.scalars), *arrays]


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "linear"])
def test_the_first_cases_have_the_sizes_of_the_corners(op: str) -> None:
    contract = spec(op)
    for (_, case), dims in zip(drawn_cases(contract, 7, range(3)), corners(contract), strict=True):
        expected = contract.make_case(np.random.default_rng(0), dims)
        first, *_ = contract.operands_of("input")
        assert case.arrays[first.name].shape == expected.arrays[first.name].shape


@pytest.mark.parametrize("op", op_names())
def test_a_case_is_told_by_its_seed_and_number(op: str) -> None:
    contract = spec(op)
    several = dict(drawn_cases(contract, 3, range(6)))
    (alone,) = drawn_cases(contract, 3, (5,))
    assert str(flat(alone[1])) == str(flat(several[5]))
    assert len({str(flat(case)) for _, case in drawn_cases(contract, 3, range(3, 20))}) > 1


@pytest.mark.parametrize("op", op_names())
def test_every_size_of_a_model_that_is_beyond_the_ranges_is_drawn_once(op: str) -> None:
    contract = spec(op)
    wide = wide_sizes(contract)
    beyond = {
        (name, size) for shape in contract.bench for name, size in shape.dims.items() if size > contract.dims[name][1]
    }
    assert sorted(wide) == sorted(beyond)
    emulated = wide_sizes(contract, emulated=True)
    assert emulated == () if contract.compose else {name for name, _ in emulated} == {name for name, _ in wide}
    assert all(contract.dims[name][1] < size <= WIDEST_EMULATED for name, size in emulated)


def test_a_wide_case_has_few_of_everything_else() -> None:
    contract = spec("rms_norm")
    assert wide_sizes(contract) == (("n", 576), ("rows", 512), ("n", 4096))
    shapes = [case.arrays["x"].shape for _, case in drawn_cases(contract, 5, range(3, 6))]
    assert [max(shape) for shape in shapes] == [576, 512, 4096]
    assert all(0 < np.prod(shape) <= 9 * max(shape) for shape in shapes)
    emulated = [case.arrays["x"].shape for _, case in drawn_cases(contract, 5, range(3, 5), emulated=True)]
    assert sorted(np.prod(shape) for shape in emulated) == [512, WIDEST_EMULATED]


@pytest.mark.parametrize("op", op_names())
def test_all_sizes_of_a_model_come_at_once_where_that_is_cheap(op: str) -> None:
    contract = spec(op)
    whole = whole_sizes(contract)
    assert whole_sizes(contract, emulated=True) == ()
    if contract.compose is not None:
        assert whole == ()
        return
    assert whole
    assert [dims for dims in whole if dims not in [shape.dims for shape in contract.bench]] == []
    # An override is checked on the first cases; none of these may be left to chance.
    assert 3 + len(wide_sizes(contract)) + len(whole) <= CASES


def test_a_kernel_that_is_wrong_where_threads_share_its_work_is_found() -> None:
    def loses_a_row(bound: Any, arrays: Any) -> Any:
        out = bound(**arrays)
        if out.numel() >= 1 << 15:  # where kernels for a CPU begin to use a second thread
            out.reshape(-1, out.shape[-1])[-1] = torch.nan
        return out

    for op in ("rms_norm", "swiglu"):
        failure = checked(op, loses_a_row).failure
        assert failure is not None
        assert failure.number < 20


def checked(op: str, change: Any, cases: int = 20) -> CheckReport:
    """What torch's own implementation is found to do with its results changed."""
    sound = implementation(op, "torch")

    def bind(call: Any) -> Any:
        bound = sound.bind(call)
        return lambda **arrays: change(bound, arrays)

    mine = SimpleNamespace(supports=sound.supports, bind=bind)
    return check_cases(op, TORCH, FLOAT32, drawn_cases(spec(op), 0, range(cases)), override=mine)


def test_a_sound_one() -> None:
    report = checked("swiglu", lambda bound, arrays: bound(**arrays))
    assert (report.agreed, report.refused, report.failure) == (20, 0, None)
    assert 0 < report.error <= 1


def test_a_number_that_is_off() -> None:
    def change(bound: Any, arrays: Any) -> Any:
        out = bound(**arrays)
        if out.shape[0] > 1:
            out[1, 0] += 1.0
        return out

    report = checked("swiglu", change)
    assert report.failure is not None
    found = report.failure.error.mismatch
    assert (found.op, found.operand, found.index) == ("swiglu", "out", (1, 0))
    assert found.actual == pytest.approx(found.expected + 1, rel=1e-6)
    assert report.agreed == report.failure.number, "none was run after it"
    assert f"swiglu: out is off in 1 of {found.sizes['T'] * found.sizes['n']} numbers" in str(report.failure.error)


def refuse() -> None:
    raise UnsupportedFeatureError("not today")


def own(change: Any) -> Any:
    """Changes a result for which no array was given."""
    return lambda bound, arrays: bound(**arrays) if "out" in arrays else change(bound(**arrays))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda bound, arrays: bound(**arrays).clone(), "out is another array than the one that it was to be written"),
        (lambda bound, arrays: None, "out is another array than"),
        (lambda bound, arrays: (bound(**arrays),) * 2, "returns 2 arrays and not 1"),
        (lambda bound, arrays: 1 / 0, "ends with ZeroDivisionError: division by zero"),
        (lambda bound, arrays: sys.exit(0), "ends with SystemExit: 0"),
        (lambda bound, arrays: refuse(), "ends with UnsupportedFeatureError: not today"),
        (lambda bound, arrays: [bound(**arrays), arrays["up"].add_(1)][0], "up was written to, and may only be read"),
        (own(lambda out: out.double()), "out is torch.Tensor of torch.float64, not torch.Tensor of"),
        (own(lambda out: out.numpy()), "out is numpy.ndarray of float32, not torch.Tensor of"),
        (own(lambda out: out.tolist()), "out is list, not torch.Tensor of torch.float32"),
    ],
    ids=[
        "another array",
        "nothing",
        "too many",
        "raises",
        "exits",
        "refuses when it is called",
        "writes to an input",
        "another dtype",
        "another library",
        "no array",
    ],
)
def test_other_departures(change: Any, complaint: str) -> None:
    failure = checked("swiglu", change).failure
    assert failure is not None
    assert complaint in str(failure.error)
    assert "under NoScalars() with sizes {" in str(failure.error)


def test_a_result_that_its_caller_cannot_write_to() -> None:
    sound = implementation("swiglu", "numba")

    def bind(call: Any) -> Any:
        bound = sound.bind(call)

        def frozen(**arrays: Any) -> Any:
            out = bound(**arrays)
            out.flags.writeable = "out" in arrays
            return out

        return frozen

    mine = SimpleNamespace(supports=sound.supports, bind=bind)
    report = check_cases("swiglu", backend("numba"), FLOAT32, drawn_cases(spec("swiglu"), 0, range(2)), override=mine)
    assert report.failure is not None
    assert "out is an array that its caller cannot write to" in str(report.failure.error)


class Remembering:
    """Torch's own implementation, which also does `more` with all calls so far: each with its arrays and its result."""

    def __init__(self, op: str, more: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._sound = implementation(op, "torch")
        self._more = more
        self.supports = self._sound.supports

    def bind(self, call: Any) -> Any:
        bound = self._sound.bind(call)
        calls: list[dict[str, Any]] = []

        def remembering(**arrays: Any) -> Any:
            calls.append({**arrays, "result": bound(**arrays)})
            self._more(calls)
            return calls[-1]["result"]

        return remembering


def only_first_right(calls: list[dict[str, Any]]) -> None:
    if len(calls) > 1:
        calls[-1]["result"].mul_(2)


def one_buffer(calls: list[dict[str, Any]]) -> None:
    if "out" not in calls[-1]:
        calls[-1]["result"] = calls[0]["result"].copy_(calls[-1]["result"])


def first_inputs(calls: list[dict[str, Any]]) -> None:
    calls[-1]["result"].copy_(torch.nn.functional.silu(calls[0]["gate"]) * calls[0]["up"])


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (only_first_right, "out is off in "),
        (one_buffer, "out of an earlier call was written to by a later one"),
        (first_inputs, "out is off in "),
        (lambda calls: calls[0]["up"].zero_(), "up was written to, and may only be read"),
        (lambda calls: calls[0]["up"].zero_() if calls[1:] else None, "up of an earlier call was written to by a"),
    ],
    ids=["right once", "one buffer", "inputs of the first", "writes to an input", "writes to an earlier input"],
)
def test_faults_of_a_second_call(more: Any, complaint: str) -> None:
    report = check_cases(
        "swiglu", TORCH, FLOAT32, drawn_cases(spec("swiglu"), 0, range(9)), override=Remembering("swiglu", more)
    )
    assert report.failure is not None
    assert complaint in str(report.failure.error)
    assert str(report.failure.error).endswith("a second time") == ("may only" not in complaint)


def test_a_kernel_that_is_right_up_to_the_ranges_of_the_contract() -> None:
    def change(bound: Any, arrays: Any) -> Any:
        out = bound(**arrays)
        out[:, 400:] = 0
        return out

    failure = checked("swiglu", change).failure
    assert failure is not None
    assert failure.error.mismatch.index is not None
    assert failure.error.mismatch.index[1] == 400


def test_a_shape_that_is_wrong() -> None:
    def change(bound: Any, arrays: Any) -> Any:
        return bound(**arrays) if "out" in arrays else bound(**arrays)[:, :-1]

    failure = checked("swiglu", change).failure
    assert failure is not None
    assert "out has shape [" in str(failure.error)


def test_a_decision_that_is_wrong() -> None:
    failure = checked("sample", lambda bound, arrays: bound(**arrays).fill_(0), cases=30).failure
    assert failure is not None
    assert "is wrong in row" in str(failure.error)
    assert failure.error.mismatch.actual == 0


def test_refusals_are_counted() -> None:
    refusing = SimpleNamespace(supports=lambda call: "out of order", bind=None)
    report = check_cases("add", TORCH, BFLOAT16, drawn_cases(spec("add"), 0, range(4)), override=refusing)
    assert (report.agreed, report.refused) == (0, 4)
    assert "out of order" in str(report.refusal)


def test_parts_and_obstacles() -> None:
    assert parts_of("swiglu") == frozenset()
    assert {"mlp", "attention_block", "linear", "swiglu"} <= parts_of("decoder_layer")
    assert obstacle("mlp", "torch") is None
    assert obstacle("quantized_linear", "torch") == "no impl_torch.py"
    assert obstacle("mlp", "abacus") == "composed of ops that it lacks: linear, swiglu"


def test_modes_that_make_no_difference_are_left_out() -> None:
    assert modes_of("swiglu", TORCH) == (FLOAT32, BFLOAT16)
    assert {str(mode) for mode in modes_of("paged_attention", TORCH)} == {
        "float32",
        "bfloat16",
        "float32-cache_float16",
    }


@pytest.mark.parametrize("op", op_names())
def test_what_is_listed_is_what_there_is(op: str) -> None:
    facts = contract_facts(op)
    assert facts | op_facts(op) == facts
    own = {name for name, service in facts["backends"].items() if service == "own"}
    assert {f"impl_{name}.py" for name in own} <= set(facts["files"])
    assert set(backend_names()) <= facts["backends"].keys()
    assert [operand["name"] for operand in facts["operands"]] == [operand.name for operand in spec(op).operands]


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import surely_not_installed.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnsupportedFeatureError, match="backend 'abacus' needs the package 'surely_not_installed'"):
        imported("needs_more", "abacus")
    with pytest.raises(ModuleNotFoundError):
        imported("pocketllm.kernels.no_such_module", "abacus")


def test_names_that_there_are_not() -> None:
    with pytest.raises(ConfigurationError, match="no op 'swigluu': did you mean 'swiglu'"):
        check_op_names(["add", "swigluu"])
    with pytest.raises(UnsupportedFeatureError, match="there is no backend 'abacus' to check; there are"):
        backend("abacus")
    with pytest.raises(UnsupportedFeatureError, match="runs on the CPU, not on 'cuda'"):
        backend("numba", "cuda")


def test_torch_holds_no_quantised_weights() -> None:
    (_, case), *_ = drawn_cases(spec("quantized_linear"), 0, range(1))
    with pytest.raises(UnsupportedFeatureError, match="computes on no quantised weights"):
        TORCH.put(case.weights["weight"], "float32")
    assert torch.equal(TORCH.put(np.ones(2), "float32"), torch.ones(2))
