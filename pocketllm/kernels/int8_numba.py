"""Products of bytes in Numba kernels: unsigned codes of a weight times signed codes of an activation, summed exactly.

Codes of eight outputs are interleaved by fours: bytes 4 r to 4 r + 3 of a vector belong to output r, so that a sum of
four neighbouring products lands in lane r. Four vectors hold 16 values of each output, eight hold 32. The sums are
integers, hence the same on every processor, whichever instructions it has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from pocketllm.kernels.jit.toolchain_numba import has_features, intrinsic
from pocketllm.kernels.simd_numba import (
    I16X16,
    I32,
    I32X8,
    LANES,
    U8X32,
    address_of,
    call_intrinsic,
    constant_of,
    f32x8,
    i32x8,
    load_from,
    splat_of,
    u8x32,
)


@intrinsic
def low_nibbles(typing: Any, bytes_: Any) -> Any:
    """The lower four bits of every byte."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.and_(arguments[0], constant_of(U8X32, 15))

    return u8x32(u8x32), emit


@intrinsic
def high_nibbles(typing: Any, bytes_: Any) -> Any:
    """The upper four bits of every byte."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.lshr(arguments[0], constant_of(U8X32, 4))

    return u8x32(u8x32), emit


@intrinsic
def splat_i32(typing: Any, number: Any) -> Any:
    """An int32 in every lane."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return splat_of(builder, arguments[0], I32X8)

    return i32x8(types.int32), emit


@intrinsic
def to_f32(typing: Any, integers: Any) -> Any:
    """int32 lanes as float32, rounded to the nearest; exact below 2**24."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], f32x8.llvm)

    return f32x8(i32x8), emit


def _dot(small: bool) -> Any:
    def typed(typing: Any, total: Any, codes: Any, values: Any, index: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            total, codes, values, index = arguments
            at = address_of(context, builder, signature.args[2], values, index, I32)
            pairs = []
            for part in range(signature.args[1].count):
                four = load_from(builder, builder.gep(at, [ir.Constant(I32, part)]))
                pairs.append((builder.extract_value(codes, part), splat_of(builder, four, I32X8)))
            return _sum_of_products(builder, total, pairs, small)

        return i32x8(i32x8, codes, values, types.intp), emit

    typed.__name__ = "dot_small" if small else "dot"
    typed.__doc__ = (
        f"``total`` plus codes (a tuple of ``u8x32``{', all below 64' if small else ''}) times the int8 `values` from "
        "`index` on, four of them for each vector."
    )
    return intrinsic(typed)


dot = _dot(small=False)
dot_small = _dot(small=True)


def _sum_of_products(builder: ir.IRBuilder, total: ir.Value, pairs: list[Any], small: bool) -> Any:
    if has_features("avx512vnni", "avx512vl") or has_features("avxvnni"):
        name = "llvm.x86.avx512.vpdpbusd.256"
        for codes, values in pairs:
            total = call_intrinsic(builder, name, I32X8, total, builder.bitcast(codes, I32X8), values)
        return total
    step = _avx2 if has_features("avx2") else _plain
    for codes, values in pairs:
        low = codes if small else builder.and_(codes, constant_of(U8X32, 127))
        total = builder.add(total, step(builder, low, values, 1))
        if not small:
            # A pair of products with codes up to 255 would not fit into 16 bits: the highest bit goes by itself.
            top = builder.lshr(codes, constant_of(U8X32, 7))
            total = builder.add(total, step(builder, top, values, 128))
    return total


def _avx2(builder: ir.IRBuilder, codes: ir.Value, values: ir.Value, factor: int) -> Any:
    """Codes up to 127: two products of at most 127 * 127 fit into 16 bits."""
    twos = call_intrinsic(builder, "llvm.x86.avx2.pmadd.ub.sw", I16X16, codes, builder.bitcast(values, U8X32))
    return call_intrinsic(builder, "llvm.x86.avx2.pmadd.wd", I32X8, twos, constant_of(I16X16, factor))


def _plain(builder: ir.IRBuilder, codes: ir.Value, values: ir.Value, factor: int) -> Any:
    wide = ir.VectorType(I32, 32)
    products = builder.mul(builder.zext(codes, wide), builder.sext(builder.bitcast(values, U8X32), wide))

    def every_fourth(first: int) -> Any:
        lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(first, 32, 4)))
        return builder.shuffle_vector(products, products, lanes)

    twos = builder.add(every_fourth(0), every_fourth(1)), builder.add(every_fourth(2), every_fourth(3))
    return builder.mul(builder.add(*twos), constant_of(I32X8, factor))


@intrinsic
def round_to_code(typing: Any, vector: Any) -> Any:
    """Numbers rounded half to even and limited to -127 and 127, still float32; NaN becomes -127."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        shift, most, least = (constant_of(f32x8.llvm, number) for number in (12582912.0, 127.0, -127.0))
        x = builder.select(builder.fcmp_ordered(">", x, least), x, least)
        x = builder.select(builder.fcmp_ordered("<", x, most), x, most)
        # 1.5 * 2**23: adding it leaves no place for a fraction.
        return builder.fsub(builder.fadd(x, shift), shift)

    return f32x8(f32x8), emit


@intrinsic
def store_codes(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """Puts eight whole numbers within int8 into an int8 array from a flat index on."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        eight = ir.VectorType(ir.IntType(8), LANES)
        address = address_of(context, builder, signature.args[0], arguments[0], arguments[1], eight)
        builder.store(builder.trunc(builder.fptosi(arguments[2], I32X8), eight), address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x8), emit
