"""Linear layer: a matrix product with a weight that the checkpoint stores output by output."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, NoScalars, Operand, OpSpec


def reference(
    s: NoScalars, *, weight: npt.NDArray[Any], x: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """``out[t, n] = sum over k of x[t, k] * weight[n, k], plus bias[n]``."""
    out = x.astype(np.float64) @ weight.astype(np.float64).T
    if bias is not None:
        out += bias
    return out.astype(x.dtype)


def make_weights(
    rng: np.random.Generator, name: str, shape: tuple[int, int], *, bias: bool
) -> dict[str, npt.NDArray[np.float32]]:
    """A normal weight [N, K] that keeps the outputs of the inputs' size, and a bias called ``<name>_bias``."""
    weight = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[1]))
    return {name: weight} | ({f"{name}_bias": rng.standard_normal(shape[0], dtype=np.float32)} if bias else {})


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """Normal inputs, with or without a bias."""
    x = rng.standard_normal((dims["T"], dims["K"]), dtype=np.float32)
    made = make_weights(rng, "weight", (dims["N"], dims["K"]), bias=bool(rng.integers(2)))
    return Case(NoScalars(), {name.removeprefix("weight_"): array for name, array in made.items()}, {"x": x})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """K products, their sum and the bias accumulate; bias, product and sum may be stored, the reference is rounded."""
    size = np.abs(case.arrays["x"].astype(np.float64)) @ np.abs(case.weights["weight"].astype(np.float64)).T
    out = np.abs(reference(NoScalars(), **case.weights, **case.arrays).astype(np.float64))
    stored = 2 * out
    bias = case.weights.get("bias")
    if bias is not None:
        size += np.abs(bias.astype(np.float64))
        stored += out + 2 * np.abs(bias.astype(np.float64))
    return {"out": (case.arrays["x"].shape[1] + 2) * ACCUMULATION_ROUNDOFF * size + u * stored}


def _bench(rows: int, outputs: int, inputs: int) -> BenchShape:
    moved = 4 * (rows * inputs + outputs * inputs + rows * outputs)
    return BenchShape({"T": rows, "N": outputs, "K": inputs}, nbytes=moved, operations=2 * rows * outputs * inputs)


SPEC = OpSpec(
    name="linear",
    summary="Matrix product with a weight in any format of a checkpoint, plus a bias where there is one.",
    scalars=NoScalars,
    operands=(
        Operand("weight", ("N", "K"), dtype="weight", role="weight"),
        Operand("bias", ("N",), dtype="float32", role="weight", optional=True),
        Operand("x", ("T", "K")),
        Operand("out", ("T", "N"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "N": (1, 70), "K": (1, 200)},
    error_bound=error_bound,
    bench=(_bench(1, 1536, 576), _bench(8, 1536, 576), _bench(512, 1536, 576), _bench(1, 4096, 4096)),
)
