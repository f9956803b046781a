"""A table of ops with some of them replaced: what is bound, what is composed, and what its digest covers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pocketllm.errors import PocketLLMError, UnsupportedFeatureError
from pocketllm.kernels import check, registry
from pocketllm.kernels.checking.arrays import FLOAT32, backend
from pocketllm.kernels.checking.comparison import scalars_of
from pocketllm.kernels.contract import Implementation
from pocketllm.kernels.overriding import check_overrides
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


def digest_with(**overrides: Any) -> str:
    ops = torch_ops(**overrides)
    ops.bind("add")
    ops.bind("swiglu")
    return ops.numerics()


def test_the_digest_covers_what_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    alone = torch_ops()
    alone.bind("add")
    plain, first = digest_with(), digest_with(swiglu=module_of(path))
    assert plain == digest_with()
    assert first == digest_with(swiglu=module_of(path, "other"))
    assert len({alone.numerics(), plain, first, digest_with(add=module_of(path))}) == 4
    path.write_text(SOURCE + "# changed\n")
    assert digest_with(swiglu=module_of(path)) != first


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


def test_an_implementation_is_checked_in_one_line() -> None:
    report = check("rms_norm", implementation("rms_norm", "torch"), backend="torch", dtype="bfloat16", cases=5)
    assert (report.agreed, report.failure) == (5, None)
    assert str(report).startswith("ok: 5 cases, error to ")
    refused = check("rms_norm", noting([], "", reason="never"), backend="torch", cases=3)
    assert (refused.agreed, refused.refused, str(refused)) == (0, 3, "3 refused: " + str(refused.refusal))
    wrong = check("rms_norm", SimpleNamespace(supports=lambda call: None, bind=lambda call: torch.add), backend="torch")
    assert wrong.failure is not None
    assert str(wrong) == f"WRONG after {wrong.agreed} right cases"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "rms_nrm"}, "no op 'rms_nrm': did you mean 'rms_norm'"),
        ({"implementation": len}, "has no supports and no bind"),
        ({"backend": "numba", "dtype": "bfloat16"}, "dtype is 'bfloat16': numba has float32"),
        ({"backend": "fortran"}, "no backend 'fortran'"),
    ],
    ids=["op", "implementation", "dtype", "backend"],
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
