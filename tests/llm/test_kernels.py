"""A user's own kernel in a model: it acts, and gives the same tokens; or it is refused before a weight is read."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import pocketllm.kernels
from pocketllm.async_llm import AsyncLLM
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.kernels.checking.comparison import KernelMismatchError
from pocketllm.kernels.contract import BoundOp, Implementation, OpCall
from pocketllm.kernels.registry import implementation
from pocketllm.llm import LLM
from pocketllm.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SMALL: dict[str, Any] = {"kv_cache_mib": 4, "max_model_len": 64}


class Counted:
    """An implementation of the house, with its calls counted; `factor` multiplies what it returns."""

    def __init__(self, op: str, backend: str, factor: float = 1.0) -> None:
        self._of: Implementation = implementation(op, backend)
        self._factor = factor
        self.calls = 0

    def supports(self, call: OpCall) -> str | None:
        return self._of.supports(call)

    def bind(self, call: OpCall) -> BoundOp:
        bound = self._of.bind(call)

        def counted(*arrays: Any, **named: Any) -> Any:
            self.calls += 1
            result = bound(*arrays, **named)
            if self._factor != 1.0:
                result *= self._factor
            return result

        return counted


class Refusing(Counted):
    """Refuses vectors of the model's width, which no small case has."""

    def supports(self, call: OpCall) -> str | None:
        return "not this width" if len(call.weights["weight"]) == 48 else None


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate("abc", GREEDY)[0].outputs[0].token_ids)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "linear", "sample"])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_sound_override_acts_and_changes_no_token(tiny: Path, backend: str, op: str) -> None:
    mine = Counted(op, backend)
    with LLM(tiny, backend=backend, **SMALL) as llm:
        expected = tokens(llm)
    with LLM(tiny, backend=backend, kernels={op: mine}, **SMALL) as llm:
        checking = mine.calls
        assert tokens(llm) == expected
    assert mine.calls >= checking + len(expected)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_a_broken_override_is_refused_before_a_weight_is_read(checkpoint: Path, backend: str) -> None:
    with pytest.raises(
        KernelMismatchError, match=r"an override .* rms_norm: out is off in .* at \[.*\] it is"
    ) as error:
        LLM(checkpoint, backend=backend, kernels={"rms_norm": Counted("rms_norm", backend, factor=1.01)})
    found = error.value.mismatch
    assert (found.op, found.operand) == ("rms_norm", "out")
    assert found.actual == pytest.approx(1.01 * found.expected, rel=1e-4)


def test_it_holds_for_models_that_are_loaded_within(tiny: Path) -> None:
    mine = Counted("rms_norm", "torch")
    with pocketllm.kernels.override("rms_norm", mine):
        llm = LLM(tiny, backend="torch", **SMALL)
    checking = mine.calls
    with llm:
        tokens(llm)
    assert mine.calls > checking
    acting = mine.calls
    with LLM(tiny, backend="torch", **SMALL) as other:
        tokens(other)
    assert mine.calls == acting


def test_a_models_own_come_before_those_around_it(tiny: Path) -> None:
    outer, inner = Counted("rms_norm", "torch"), Counted("rms_norm", "torch")
    swiglu = Counted("swiglu", "torch")
    with (
        pocketllm.kernels.override("rms_norm", outer),
        pocketllm.kernels.override("swiglu", swiglu),
        LLM(EngineArgs(model=str(tiny), backend="torch", kernels={"rms_norm": inner}, **SMALL)) as llm,
    ):
        tokens(llm)
    assert (outer.calls, inner.calls > 0, swiglu.calls > 0) == (0, True, True)


def test_it_reaches_a_model_that_is_loaded_on_another_thread(tiny: Path) -> None:
    mine = Counted("rms_norm", "torch")

    async def load() -> None:
        with pocketllm.kernels.override("rms_norm", mine):
            async with AsyncLLM(tiny, backend="torch", **SMALL):
                pass

    asyncio.run(load())
    assert mine.calls > 0


@pytest.mark.parametrize(
    ("kernels", "error", "message"),
    [
        ({"rms_nrm": Counted("rms_norm", "torch")}, ConfigurationError, "there is no op 'rms_nrm': did you mean 'rms_"),
        ({"frobnicate": None}, ConfigurationError, "no op 'frobnicate': the ops are add, attention_block"),
        ({"rms_norm": len}, ConfigurationError, r"which has no supports and no bind: give an object or a module"),
        ([], ConfigurationError, r"kernels is \[\]: give a mapping from op to implementation"),
        ({"quantized_linear": Counted("rms_norm", "torch")}, UnsupportedFeatureError, "computes on no quantised"),
    ],
    ids=["misspelt", "unknown", "no implementation", "no mapping", "not of this backend"],
)
def test_what_cannot_be_overridden(checkpoint: Path, kernels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(checkpoint, backend="torch", kernels=kernels)


def test_an_override_that_would_never_act_is_refused(tiny: Path) -> None:
    mine = Counted("quantized_linear", "numba")
    with pytest.raises(UnsupportedFeatureError, match=r"override of 'quantized_linear' would never act: .* binds add,"):
        LLM(tiny, backend="numba", kernels={"quantized_linear": mine}, **SMALL)


def test_an_override_that_refuses_the_model_is_not_passed_over(tiny: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match="override of 'rms_norm' cannot run it here: not this width"):
        LLM(tiny, backend="torch", kernels={"rms_norm": Refusing("rms_norm", "torch")}, **SMALL)


def test_arguments_keep_their_own_mapping() -> None:
    given = {"rms_norm": Counted("rms_norm", "torch")}
    args = EngineArgs(kernels=given)
    given.clear()
    assert dataclasses.replace(args).kernels.keys() == {"rms_norm"}
