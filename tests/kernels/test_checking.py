"""Checking an implementation: which cases are drawn, and what is said about one that is wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, backend, backend_names
from pocketllm.kernels.checking.cases import CheckReport, check_cases, corners, drawn_cases
from pocketllm.kernels.checking.comparison import plain
from pocketllm.kernels.checking.discovery import modes_of, obstacle, parts_of
from pocketllm.kernels.checking.inventory import contract_facts, op_facts
from pocketllm.kernels.contract import Case
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


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda bound, arrays: bound(**arrays).clone(), "out is another array than the one that it was to be written"),
        (lambda bound, arrays: None, "out is another array than"),
        (lambda bound, arrays: (bound(**arrays),) * 2, "returns 2 arrays and not 1"),
        (lambda bound, arrays: 1 / 0, "ends with ZeroDivisionError: division by zero"),
        (lambda bound, arrays: [bound(**arrays), arrays["up"].add_(1)][0], "up was written to, and may only be read"),
    ],
    ids=["another array", "nothing", "too many", "raises", "writes to an input"],
)
def test_other_departures(change: Any, complaint: str) -> None:
    failure = checked("swiglu", change).failure
    assert failure is not None
    assert complaint in str(failure.error)
    assert "under NoScalars() with sizes {" in str(failure.error)


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
