"""Linear layer over a block-quantised weight, with activations rounded to int8.

Source: the integer products of ggml's CPU kernels (activations in blocks of 32, as in its format Q8_0), with the order
of the sums fixed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.checkpoint.quant import FORMATS, QuantTensor
from pocketllm.kernels.contract import ACCUMULATION_ROUNDOFF, BenchShape, Case, Dims, NoScalars, Operand, OpSpec
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES, Codes, row_codes

BLOCK = 32
"""Values of an activation that share a scale."""

Floats = npt.NDArray[np.float64]


def quantized_activations(x: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes int8 [T, K] and scales float32 [T, K / 32] of activations [T, K].

    ``scale = max |x| / 127`` and ``code = x / scale`` rounded half to even, both divisions in float32. Where the scale
    is zero the codes are, too. A block that holds a number which is not finite gets the scale NaN.
    """
    blocks = x.astype(np.float32).reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    finite = np.isfinite(blocks.sum(axis=-1, dtype=np.float64))
    scales = np.abs(blocks).max(axis=-1, initial=0.0) / np.float32(127)
    divisor = np.where(finite & (scales > 0), scales, np.float32(1))[:, :, None]
    # Clipped, because a scale among the subnormal numbers may be too small by half.
    codes = np.clip(np.rint(np.where(finite[:, :, None], blocks, 0.0) / divisor), -127, 127).astype(np.int8)
    return codes.reshape(x.shape), np.where(finite, scales, np.float32(np.nan))


def _terms(weight: QuantTensor, x: npt.NDArray[Any]) -> tuple[Floats, Floats]:
    """Products [G, T, N] of each group of a row's values, and those of its minimum, before they are summed over G."""
    codes, scales = quantized_activations(x)
    stored: Codes = row_codes(weight, 0, weight.shape[0])
    groups = stored.scales.shape[1]
    left = codes.reshape(len(x), groups, x.shape[1] // groups).astype(np.float64).swapaxes(0, 1)
    right = stored.codes.reshape(len(stored.codes), groups, -1).astype(np.float64) - stored.offset
    scale = scales.astype(np.float64).repeat(groups // scales.shape[1], axis=1).T[:, :, None]
    with np.errstate(invalid="ignore"):  # zero times the scale NaN
        products = scale * stored.scales.T.astype(np.float64)[:, None] * (left @ right.transpose(1, 2, 0))
        minima = np.zeros_like(products)
        if stored.minima is not None:
            minima = scale * left.sum(axis=2, keepdims=True) * stored.minima.T.astype(np.float64)[:, None]
    return products, minima


def reference(
    s: NoScalars, *, weight: QuantTensor, x: npt.NDArray[Any], bias: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """``out[t, n] = sum over k of x'[t, k] * weight[n, k], plus bias[n]``, where x' is x as `quantized_activations`.

    With K cut into the weight's groups, of which each lies in one block of activations, it is the sum over groups of
    ``weight scale * activation scale * (integer sum of products of codes)``, plus the sum over groups of ``minimum *
    activation scale * (integer sum of codes)``. An implementation adds the groups of each sum in ascending order to
    one accumulator, each by a fused multiply-add on the rounded product of the scales (or of the activation scale and
    the sum of its codes), and the second sum to the first at the end. The bits of a row then depend on the row alone.
    """
    products, minima = _terms(weight, x)
    out: Floats = products.sum(axis=0) + minima.sum(axis=0)
    if bias is not None:
        out += bias
    return out.astype(x.dtype)


def make_weight(rng: np.random.Generator, format: str, shape: tuple[int, int]) -> QuantTensor:
    """Random blocks, whose codes are uniform, with scales that keep the outputs of the inputs' size."""
    layout = FORMATS[format]
    data = rng.integers(0, 256, size=(shape[0], layout.row_bytes(shape[1])), dtype=np.uint8)
    blocks = data.reshape(-1, layout.block_bytes)
    levels = {"Q4": 15, "Q5": 31, "Q6": 63 * 64, "Q8": 255}[format[:2]] * (63 if format in ("Q4_K", "Q5_K") else 1)
    size = 4.0 / (levels * np.sqrt(shape[1]))
    for at in {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(format, (0, 2)):
        sign = 1 if format.endswith("_K") else rng.choice([-1, 1], size=len(blocks))
        scales = (rng.uniform(0.1, 1.0, size=len(blocks)) * size * sign).astype("<f2")
        # A minimum that moves the middle of the codes to zero.
        blocks[:, at : at + 2] = (scales if at != 2 else scales * np.float16(levels / 2)).view(np.uint8).reshape(-1, 2)
    return QuantTensor(data, format, shape)


def make_case(rng: np.random.Generator, dims: Dims) -> Case:
    """A weight of any format; inputs of mixed magnitude, some blocks of them zero; with or without a bias."""
    format = FORMATS_WITH_CODES[dims["format"] % len(FORMATS_WITH_CODES)]
    columns = dims["blocks"] * FORMATS[format].block_values
    shape = (dims["T"], dims["blocks"] * FORMATS[format].block_values // BLOCK, 1)
    magnitude = 10.0 ** rng.uniform(-6, 3, size=shape) * rng.integers(0, 4, size=shape).clip(max=1)
    x = (rng.standard_normal((*shape[:2], BLOCK)) * magnitude).astype(np.float32).reshape(dims["T"], columns)
    weights: dict[str, Any] = {"weight": make_weight(rng, format, (dims["N"], columns))}
    if rng.integers(2):
        weights["bias"] = rng.standard_normal(dims["N"], dtype=np.float32)
    return Case(NoScalars(), weights, {"x": x})


def error_bound(case: Case, u: float) -> dict[str, npt.NDArray[np.float64]]:
    """Each of two sums of G terms errs by G + 1 roundings of its size; two additions follow.

    The result is stored and the reference rounded.

    A scale below the normal numbers is rounded by more; a term with one is off by the least normal number at most.
    """
    weight, x = case.weights["weight"], case.arrays["x"]
    products, minima = _terms(weight, x)  # type: ignore[arg-type]
    size = np.abs(products).sum(axis=0) + np.abs(minima).sum(axis=0)
    bias = case.weights.get("bias")
    added = size if bias is None else size + np.abs(bias.astype(np.float64))
    tiny = float(np.finfo(np.float32).tiny) * 255 * BLOCK * len(products)
    out = np.abs(reference(NoScalars(), **case.weights, **case.arrays).astype(np.float64))  # type: ignore[arg-type]
    return {"out": ACCUMULATION_ROUNDOFF * ((len(products) + 1) * size + 2 * added) + tiny + 2 * u * out}


def _bench(rows: int, outputs: int, blocks: int, format: str) -> BenchShape:
    columns = blocks * FORMATS[format].block_values
    dims = {"T": rows, "N": outputs, "blocks": blocks, "format": FORMATS_WITH_CODES.index(format)}
    moved = outputs * FORMATS[format].row_bytes(columns) + 4 * rows * (columns + outputs)
    return BenchShape(dims, nbytes=moved, operations=2 * rows * outputs * columns)


SPEC = OpSpec(
    name="quantized_linear",
    summary="Matrix product of activations rounded to int8 with a block-quantised weight, plus an optional bias.",
    scalars=NoScalars,
    operands=(
        Operand("weight", ("N", "K"), dtype="weight", role="weight"),
        Operand("bias", ("N",), dtype="float32", role="weight", optional=True),
        Operand("x", ("T", "K")),
        Operand("out", ("T", "N"), role="output"),
    ),
    reference=reference,
    make_case=make_case,
    dims={"T": (0, 9), "N": (1, 40), "blocks": (1, 5), "format": (0, len(FORMATS_WITH_CODES) - 1)},
    error_bound=error_bound,
    bench=(
        *(_bench(rows, 1536, 18, format) for format in ("Q4_0", "Q4_1", "Q8_0") for rows in (1, 8, 512)),
        *(_bench(1, 4096, 16, format) for format in ("Q4_K", "Q6_K")),
    ),
)
