"""A table of ops with some of them replaced: what is bound, what is composed, and what its digest covers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.errors import ConfigurationError, PocketLLMError, UnsupportedFeatureError
from pocketllm.kernels import check, override, registry
from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.comparison import KernelMismatchError, scalars_of
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.overriding import check_overrides, requested_overrides
from pocketllm.kernels.quantized_linear.op_table import QuantizedOpTable
from pocketllm.kernels.quantized_linear.spec import make_weight
from pocketllm.kernels.registry import BackendOpTable, implementation, spec

SOURCE = "def supports(call):\n    return None\n\n\ndef bind(call):\n    return None\n"


def noting(log: list[str], name: str, reason: str | None = None) -> Implementation:
    """An implementation that notes that it was bound."""
    return SimpleNamespace(supports=lambda call: reason, bind=lambda call: log.append(name))


def own_whole(op: str, whole: Implementation, patch: pytest.MonkeyPatch) -> None:
    """Lets every backend have a kernel of its own for a composite."""
    backends, found = registry.backends_of, registry.implementation
    patch.setattr(registry, "backends_of", lambda o: (*backends(o), "torch", "numba") if o == op else backends(o))
    patch.setattr(registry, "implementation", lambda o, b: whole if o == op else found(o, b))


def torch_ops(**overrides: Implementation) -> BackendOpTable:
    return BackendOpTable("torch", device="cpu", dtype="float32", overrides=overrides)


def mlp_weights() -> dict[str, Any]:
    case = spec("mlp").make_case(np.random.default_rng(0), {name: high for name, (_, high) in spec("mlp").dims.items()})
    return {name: torch.tensor(array) for name, array in case.weights.items()}


@pytest.mark.parametrize(
    ("overridden", "bound"),
    [
        ((), ["whole"]),
        (("rms_norm",), ["whole"]),
        (("swiglu",), ["swiglu"]),
        (("linear",), ["linear"] * 3),
        (("mlp",), ["mlp"]),
        (("mlp", "swiglu"), ["mlp"]),
    ],
)
def test_a_kernel_of_the_whole_hides_no_override(
    overridden: tuple[str, ...], bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    own_whole("mlp", noting(log, "whole"), monkeypatch)
    torch_ops(**{op: noting(log, op) for op in overridden}).bind("mlp", mlp_weights())
    assert log == bound


def test_parts_are_those_that_the_weights_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    own_whole("mlp", noting(log, "whole"), monkeypatch)
    rng = np.random.default_rng(0)
    weights = {name: make_weight(rng, "Q8_0", (32, 32)) for name in ("gate", "up", "down")}
    for op in ("quantized_linear", "linear"):
        ops = QuantizedOpTable("numba", device="cpu", dtype="float32", overrides={op: noting(log, op)})
        ops.bind("mlp", weights)
    assert log == ["quantized_linear"] * 3 + ["whole"]


def test_a_refusal_is_not_passed_over() -> None:
    with pytest.raises(UnsupportedFeatureError, match="the override of 'swiglu' cannot run it here: too warm"):
        torch_ops(swiglu=noting([], "swiglu", reason="too warm")).bind("swiglu")


def raising(error: BaseException) -> Any:
    def function(call: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("supports", "bind", "message"),
    [
        (raising(ValueError("576?")), len, "supports of the override of 'swiglu' ends with ValueError: 576?"),
        (lambda call: None, raising(KeyError("x")), "bind of the override of 'swiglu' ends with KeyError: 'x'"),
        (lambda call: None, raising(SystemExit(0)), "bind of the override of 'swiglu' ends with SystemExit: 0"),
        (lambda call: False, len, "'swiglu' answers supports(call) with False: return None"),
        (lambda call: "", len, "'swiglu' answers supports(call) with '': return None"),
    ],
    ids=["supports raises", "bind raises", "exits", "false", "no reason"],
)
def test_an_override_that_breaks_when_it_is_bound_is_named(supports: Any, bind: Any, message: str) -> None:
    mine = SimpleNamespace(supports=supports, bind=bind)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        torch_ops(swiglu=mine).bind("swiglu")
    found = check("swiglu", mine, backend="torch", cases=3)
    assert found.failure is not None
    assert "swiglu cannot be bound: " in str(found.failure.error)
    assert message in str(found.failure.error)


def test_a_refusal_by_bind_is_one() -> None:
    mine = SimpleNamespace(supports=lambda call: None, bind=raising(UnsupportedFeatureError("too warm")))
    with pytest.raises(UnsupportedFeatureError, match="the override of 'swiglu' cannot run it here: too warm"):
        torch_ops(swiglu=mine).bind("swiglu")


def test_overrides_are_left_in_any_order() -> None:
    first, second = override("add", noting([], "")), override("swiglu", noting([], ""))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert requested_overrides({}).keys() == {"swiglu"}
    second.__exit__(None, None, None)
    assert requested_overrides({}) == {}


def test_an_override_may_be_entered_twice_and_the_last_one_holds() -> None:
    outer, inner = noting([], "outer"), noting([], "inner")
    mine = override("add", outer)
    with mine:
        with override("add", inner), mine:
            assert requested_overrides({}) == {"add": outer}
        assert requested_overrides({}) == {"add": outer}
        with override("add", inner):
            assert requested_overrides({}) == {"add": inner}
    assert requested_overrides({}) == {}


def test_an_override_has_to_be_bound() -> None:
    ops = torch_ops(swiglu=noting([], "swiglu"), add=noting([], "add"))
    ops.bind("add")
    with pytest.raises(UnsupportedFeatureError, match=r"override of 'swiglu' would never act: .* binds add \("):
        ops.check_overrides_bound()
    ops.bind("swiglu")
    ops.check_overrides_bound()


def module_of(path: Path, name: str = "mine") -> ModuleType:
    found = ModuleType(name)
    found.__file__ = str(path)
    exec(path.read_text(), vars(found))
    return found


def module_named(name: str) -> ModuleType:
    """A module that no file and no import made."""
    found = ModuleType(name)
    exec(SOURCE, vars(found))
    return found


def digest_with(**overrides: Any) -> str:
    ops = torch_ops(**overrides)
    ops.bind("add")
    ops.bind("swiglu")
    return ops.numerics()


def test_the_digest_covers_what_is_bound() -> None:
    alone, ours = torch_ops(), implementation("swiglu", "torch")
    alone.bind("add")
    plain, replaced = digest_with(), digest_with(swiglu=ours)
    assert (plain, replaced) == (digest_with(), digest_with(swiglu=ours))
    assert len({alone.numerics(), plain, replaced, digest_with(add=implementation("add", "torch"))}) == 4


def test_no_digest_stands_for_a_file_that_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    mine = module_of(path)
    assert digest_with(swiglu=mine) != digest_with(swiglu=mine)
    path.unlink()
    assert digest_with(swiglu=mine)
    assert digest_with(swiglu=module_named("dynamic"))
    assert digest_with(swiglu=module_named("pocketllm.kernels.swiglu.impl_torch")) != digest_with(
        swiglu=module_named("pocketllm.kernels.swiglu.impl_torch")
    )


def test_the_digest_covers_what_a_module_of_kernels_imports() -> None:
    sources = {path.name for path in torch_ops()._sources("sample")}
    assert {"impl_torch.py", "philox_torch.py"} <= sources


def test_an_object_is_equal_to_nothing() -> None:
    mine = noting([], "swiglu")
    assert digest_with(swiglu=mine) != digest_with(swiglu=mine)


def test_an_override_of_few_sizes_is_checked_at_those_that_are_timed() -> None:
    sound = implementation("rms_norm", "torch")

    def wide_only(call: Any) -> str | None:
        return None if len(call.weights["weight"]) >= 512 else "narrow"

    def halved(call: Any) -> Any:
        bound = sound.bind(call)
        return lambda **arrays: bound(**arrays).mul_(0.5)

    check_overrides(
        {"rms_norm": SimpleNamespace(supports=wide_only, bind=sound.bind)}, "torch", device="cpu", dtype="float32"
    )
    with pytest.raises(Exception, match=r"rms_norm: out is off in .* \{'n': 576\}"):
        check_overrides(
            {"rms_norm": SimpleNamespace(supports=wide_only, bind=halved)}, "torch", device="cpu", dtype="float32"
        )
    with pytest.raises(UnsupportedFeatureError, match=r"refuses every case of its contract, .*: never"):
        check_overrides({"rms_norm": noting([], "", reason="never")}, "torch", device="cpu", dtype="float32")


def test_an_override_is_checked_at_the_widths_of_models() -> None:
    sound = implementation("rms_norm", "torch")

    def narrow(call: Any) -> Any:
        bound = sound.bind(call)

        def norm(*arrays: Any, **named: Any) -> Any:
            out = bound(*arrays, **named)
            out[..., 400:] = 0
            return out

        return norm

    with pytest.raises(KernelMismatchError, match=r"rms_norm: out is off in .* \{'n': 576\}"):
        check_overrides(
            {"rms_norm": SimpleNamespace(supports=sound.supports, bind=narrow)}, "torch", device="cpu", dtype="float32"
        )


def test_an_implementation_is_checked_in_one_line() -> None:
    report = check("rms_norm", implementation("rms_norm", "torch"), backend="torch", dtype="bfloat16", cases=5)
    assert (report.agreed, report.failure) == (5, None)
    assert str(report).startswith("ok: 5 cases, error to ")
    refused = check("rms_norm", noting([], "", reason="never"), backend="torch", cases=3)
    assert (refused.agreed, refused.refused, str(refused)) == (0, 3, "3 refused: " + str(refused.refusal))
    wrong = check("rms_norm", SimpleNamespace(supports=lambda call: None, bind=lambda call: torch.add), backend="torch")
    assert wrong.failure is not None
    assert str(wrong).startswith(f"WRONG after {wrong.agreed} right case")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "rms_nrm"}, "no op 'rms_nrm': did you mean 'rms_norm'"),
        ({"implementation": len}, "has no supports and no bind"),
        ({"implementation": SimpleNamespace(supports=1, bind=2)}, "has no supports and no bind"),
        ({"implementation": SimpleNamespace}, r"is the class SimpleNamespace: give an instance, such as Simple.*\(\)"),
        ({"cases": 0}, "cases is 0: give a whole number from 1"),
        ({"cases": "9"}, "cases is '9': give a whole number from 1"),
        ({"seed": -1}, "seed is -1: give a whole number from 0"),
        ({"device": 0}, "device is 0: give its name"),
        ({"backend": None}, "backend is None: give its name"),
        ({"backend": "numba", "dtype": "bfloat16"}, "dtype is 'bfloat16': numba has float32"),
        ({"backend": "fortran"}, "no backend 'fortran'"),
    ],
    ids=[
        "op",
        "implementation",
        "no functions",
        "class",
        "no cases",
        "cases",
        "seed",
        "device",
        "no backend",
        "dtype",
        "backend",
    ],
)
def test_what_cannot_be_checked(arguments: dict[str, Any], message: str) -> None:
    given = {"op": "rms_norm", "implementation": noting([], ""), "backend": "torch"} | arguments
    with pytest.raises(PocketLLMError, match=message):
        check(**given)


def test_an_adapters_table_takes_overrides() -> None:
    contract = spec("rms_norm")
    case = contract.make_case(np.random.default_rng(0), {"rows": 1, "heads": 0, "n": 4})
    log: list[str] = []
    for name in ("torch", "numba", "triton"):
        found = backend(name)
        weights = {key: found.put(array, "float32") for key, array in case.weights.items()}
        found.table(FLOAT32, {"rms_norm": noting(log, name)}).bind("rms_norm", weights, **scalars_of(case))
    assert log == ["torch", "numba", "triton"]
