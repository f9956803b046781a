"""Every contract is well-formed, and the registry refuses with reasons."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels import registry
from pocketllm.kernels.checking.comparison import plain, reference_results
from pocketllm.kernels.contract import UNIT_ROUNDOFF, Case, NoScalars, Operand, OpSpec
from pocketllm.kernels.registry import BackendOpTable, ReferenceOpTable, op_names, spec

EVERY_OP = pytest.mark.parametrize("op", op_names())
EVERY_BENCH = pytest.mark.parametrize(
    ("op", "index"), [(op, index) for op in op_names() for index in range(len(spec(op).bench))]
)
NUMPY_DTYPES = {"activation": "float32", "weight": "float32", "cache": "float32"}


def cases(op: str) -> list[Case]:
    """Cases of the least, the most and some sizes between."""
    rng = np.random.default_rng(0)
    contract = spec(op)
    chosen = [{name: ends[end] for name, ends in contract.dims.items()} for end in (0, 1)]
    chosen += [{name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()}] * 4
    return [contract.make_case(rng, dims) for dims in chosen]


@EVERY_OP
def test_names_are_unique_and_scalars_frozen(op: str) -> None:
    contract = spec(op)
    names = [operand.name for operand in contract.operands] + [f.name for f in dataclasses.fields(contract.scalars)]
    assert contract.summary.endswith(".")
    assert contract.scalars.__dataclass_params__.frozen
    # Weights and scalars may share a name with nothing else, for references take both as keywords.
    assert len(names) == len(set(names))


@EVERY_OP
def test_every_scalar_is_varied(op: str) -> None:
    """An implementation that takes one for a constant is found only where cases differ in it."""
    contract = spec(op)
    rng = np.random.default_rng(0)
    drawn = [{name: int(rng.integers(low, high + 1)) for name, (low, high) in contract.dims.items()} for _ in range(80)]
    scalars = [contract.make_case(rng, dims).scalars for dims in drawn]
    for field in dataclasses.fields(contract.scalars):
        assert len({getattr(values, field.name) for values in scalars}) > 1, field.name


@EVERY_OP
def test_its_folder_is_a_package(op: str) -> None:
    # Without one it is found here, and missing from what is built.
    assert (Path(registry.__file__).parent / op / "__init__.py").is_file()


@EVERY_OP
def test_cases_follow_the_contract(op: str) -> None:
    contract = spec(op)
    for case in cases(op):
        assert type(case.scalars) is contract.scalars
        for roles, given in ((("weight",), case.weights), (("input", "inout"), case.arrays)):
            operands = {operand.name: operand for operand in contract.operands_of(*roles)}
            required = {name for name, operand in operands.items() if not operand.optional}
            assert required <= given.keys() <= operands.keys()
            for name, array in given.items():
                if isinstance(array, QuantTensor):
                    assert operands[name].dtype == "weight", name
                    continue
                assert array.dtype == NUMPY_DTYPES.get(operands[name].dtype, operands[name].dtype), name
        results = reference_results(contract, case, ReferenceOpTable())
        found = contract.sizes({**case.weights, **case.arrays, **results})
        named = {dim.partition("+")[0] for o in contract.operands for dim in o.dims if isinstance(dim, str)}
        assert found.keys() <= named


@EVERY_OP
def test_results_have_the_dtypes_and_bounds_of_the_contract(op: str) -> None:
    contract = spec(op)
    for case in cases(op):
        results = reference_results(contract, case, ReferenceOpTable())
        given = {**case.weights, **case.arrays}
        wanted = [o for o in contract.operands_of("output", "inout") if o.role == "output" or o.name in given]
        assert results.keys() == {operand.name for operand in wanted}
        for operand in wanted:
            assert results[operand.name].dtype == NUMPY_DTYPES.get(operand.dtype, operand.dtype), operand.name
        if contract.error_bound is None:
            continue
        for name, bound in contract.error_bound(case, UNIT_ROUNDOFF["float32"]).items():
            assert bound.shape == results[name].shape
            assert bound.dtype == np.float64
            assert (bound >= 0).all()


@EVERY_OP
def test_error_bound_does_not_change_the_case(op: str) -> None:
    contract = spec(op)
    for case in cases(op) if contract.error_bound is not None else ():
        before = {name: plain(array).copy() for name, array in {**case.weights, **case.arrays}.items()}
        contract.error_bound(case, 2.0**-24)
        for name, array in {**case.weights, **case.arrays}.items():
            np.testing.assert_array_equal(plain(array), before[name])


@EVERY_BENCH
def test_bench_shapes_build(op: str, index: int) -> None:
    contract = spec(op)
    shape = contract.bench[index]
    assert shape.dims.keys() == contract.dims.keys()
    assert shape.nbytes > 0
    assert shape.operations >= 0
    case = contract.make_case(np.random.default_rng(0), shape.dims)
    contract.sizes({**case.weights, **case.arrays})


@EVERY_OP
def test_every_op_is_timed(op: str) -> None:
    assert spec(op).bench


def test_sizes_name_the_array_that_disagrees() -> None:
    contract = spec("linear")
    with pytest.raises(ValueError, match=r"linear: x is \[2, 5\], not \['T', 'K'\] with K = 4"):
        contract.sizes({"weight": np.zeros((3, 4)), "x": np.zeros((2, 5))})
    with pytest.raises(ValueError, match=r"linear: x is \[5\]"):
        contract.sizes({"x": np.zeros(5)})
    with pytest.raises(ValueError, match=r"rotary: angles is \[2, 3, 4\]"):
        spec("rotary").sizes({"angles": np.zeros((2, 3, 4))})
    with pytest.raises(ValueError, match="leading sizes"):
        spec("rms_norm").sizes({"x": np.zeros((2, 3, 4)), "residual": np.zeros((2, 4))})


def test_a_contract_has_a_reference_or_a_composition() -> None:
    with pytest.raises(TypeError, match="exactly one of them"):
        OpSpec("nothing", "Nothing.", NoScalars, (Operand("x", ("T",)),), make_case=spec("add").make_case, dims={})


def test_registry_errors() -> None:
    torch_ops = BackendOpTable("torch", device="cpu", dtype="float32")
    weight = {"weight": np.zeros((3, 4))}
    with pytest.raises(KeyError, match=r"no op 'soft_max'; the ops are add, .*take_rows"):
        spec("soft_max")
    with pytest.raises(UnsupportedFeatureError, match=r"'abacus' has no kernel for 'linear' \(.*torch"):
        BackendOpTable("abacus", device="cpu", dtype="float32").bind("linear", weight)
    with pytest.raises(
        UnsupportedFeatureError, match=r"'torch' cannot run 'linear' here: .*not a floating-point tensor"
    ):
        torch_ops.bind("linear", weight)
    for ops in (torch_ops, ReferenceOpTable()):
        with pytest.raises(TypeError, match=r"rms_norm: unknown scalars \['epsilon'\], missing scalars \['eps'\]"):
            ops.bind("rms_norm", weight, epsilon=1e-5)
        with pytest.raises(TypeError, match=r"rms_norm: unknown weights \['scale'\], missing weights \['weight'\]"):
            ops.bind("rms_norm", {"scale": np.zeros(4)}, eps=1e-5)


def test_head_norms_need_their_epsilon() -> None:
    projections = {name: np.zeros((4, 4), np.float32) for name in "qkvo"}
    with pytest.raises(ValueError, match=r"need a norm_eps above 0, not 0\.0"):
        ReferenceOpTable().bind(
            "attention_block", {**projections, "q_norm": np.ones(2)}, heads=2, kv_heads=2, head_dim=2, scale=1.0
        )
