"""Vectors of 8 lanes as values in Numba kernels, with arithmetic whose bits do not depend on the processor.

`f32x8` and `i32x8` hold 8 numbers, `u8x32` holds 32 bytes. Kernels load them from contiguous arrays by flat index,
combine them with the functions below and store them again; LLVM keeps them in registers. Where a processor has an
instruction for the whole of a step it is used, else the step is made of smaller ones with the same result.

A function that takes ``f32x8`` or ``float32`` does the same operations on either, so a number comes out the same in a
vector and in the tail behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from pocketllm.kernels.jit.toolchain_numba import device, has_features, intrinsic

LANES = 8

_F32, I32, _I16, _I8, _F16 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8), ir.HalfType()
_F32X8, I32X8 = ir.VectorType(_F32, LANES), ir.VectorType(I32, LANES)
U8X32, I16X16 = ir.VectorType(_I8, 32), ir.VectorType(_I16, 16)


class Vector(types.Type):
    """A vector as Numba sees it."""

    def __init__(self, name: str, llvm: ir.VectorType) -> None:
        self.llvm = llvm
        super().__init__(name)


f32x8 = Vector("f32x8", _F32X8)
i32x8 = Vector("i32x8", I32X8)
u8x32 = Vector("u8x32", U8X32)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


Emit = Callable[..., Any]


def constant_of(type_: ir.Type, number: float) -> ir.Constant:
    """A constant, in every lane where the type is a vector."""
    return (
        ir.Constant(type_, [number] * type_.count) if isinstance(type_, ir.VectorType) else ir.Constant(type_, number)
    )


def call_intrinsic(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> Any:
    """A call of one of LLVM's own functions."""
    function_type = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)  # type: ignore[no-untyped-call]
    return builder.call(function, arguments)


def _overloaded(type_: ir.Type) -> str:
    """How LLVM names a type at the end of an intrinsic's name."""
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_overloaded(type_.element)}"
    return "f32" if type_ == _F32 else f"i{type_.width}"


def splat_of(builder: ir.IRBuilder, scalar: ir.Value, vector: ir.VectorType) -> Any:
    """A scalar in every lane."""
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(
        single, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
    )


def address_of(
    context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, index: ir.Value, to: ir.Type
) -> Any:
    """Where the number at a flat index of an array lies, as a pointer to `to`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def load_from(builder: ir.IRBuilder, address: ir.Value) -> Any:
    """Loads; arrays promise no more than the alignment of their numbers."""
    value = builder.load(address)
    value.align = 1
    return value


def loader(name: str, result: types.Type, read: Callable[[Any, Any], Any], stored: ir.Type, doc: str) -> Any:
    """An intrinsic ``name(array, index)`` that reads `stored` at a flat index and turns it into `result`."""

    def typed(typing: Any, array: Any, index: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            address = address_of(context, builder, signature.args[0], arguments[0], arguments[1], stored)
            return read(builder, load_from(builder, address))

        return result(array, types.intp), emit

    typed.__name__, typed.__doc__ = name, doc
    return intrinsic(typed)


def _same(builder: ir.IRBuilder, value: ir.Value) -> Any:
    return value


def _half_to_single(builder: ir.IRBuilder, half: ir.Value) -> Any:
    """Eight float16, as int16 lanes, to float32; exact."""
    if has_features("f16c"):
        return builder.fpext(builder.bitcast(half, ir.VectorType(_F16, LANES)), _F32X8)
    bits = builder.zext(half, I32X8)
    sign = builder.shl(builder.and_(bits, constant_of(I32X8, 0x8000)), constant_of(I32X8, 16))
    magnitude = builder.and_(bits, constant_of(I32X8, 0x7FFF))
    # As a float32 with the exponent's bias of a float16, 2**112 too small.
    small = builder.bitcast(builder.shl(magnitude, constant_of(I32X8, 13)), _F32X8)
    value = builder.bitcast(builder.fmul(small, constant_of(_F32X8, 2.0**112)), I32X8)
    special = builder.icmp_unsigned(">=", magnitude, constant_of(I32X8, 0x7C00))
    value = builder.select(special, builder.or_(value, constant_of(I32X8, 0x7F800000)), value)
    return builder.bitcast(builder.or_(value, sign), _F32X8)


load_f32 = loader("load_f32", f32x8, _same, _F32X8, "Eight float32 of an array from a flat index on.")
load_u8 = loader("load_u8", u8x32, _same, U8X32, "32 bytes of a uint8 array.")
load_singles = loader("load_singles", f32x8, _same, _F32X8, "Eight float32 that lie in a uint8 array.")
load_halves = loader(
    "load_halves", f32x8, _half_to_single, ir.VectorType(_I16, LANES), "Eight float16 that lie in a uint8 array."
)
splat_f32 = loader(
    "splat_f32", f32x8, lambda builder, value: splat_of(builder, value, _F32X8), _F32, "One float32 in every lane."
)


@intrinsic
def store_f32(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """Puts eight float32 into an array from a flat index on."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        address = address_of(context, builder, signature.args[0], arguments[0], arguments[1], _F32X8)
        builder.store(arguments[2], address).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x8), emit


def _operation(name: str, emit_one: Emit, doc: str, count: int) -> Any:
    """An intrinsic of `count` operands, all ``f32x8`` or all ``float32``."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return emit_one(builder, *arguments)

    def result_of(first: Any) -> Any:
        return first if isinstance(first, Vector) else types.float32

    if count == 1:

        def typed1(typing: Any, a: Any) -> Any:
            kind = result_of(a)
            return kind(kind), emit

        typed: Any = typed1
    elif count == 2:

        def typed2(typing: Any, a: Any, b: Any) -> Any:
            kind = result_of(a)
            return kind(kind, kind), emit

        typed = typed2
    else:

        def typed3(typing: Any, a: Any, b: Any, c: Any) -> Any:
            kind = result_of(a)
            return kind(kind, kind, kind), emit

        typed = typed3
    typed.__name__, typed.__doc__ = name, doc
    return intrinsic(typed)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> Any:
    return call_intrinsic(builder, f"llvm.fma.{_overloaded(a.type)}", a.type, a, b, c)


def _maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _sum_pairwise(builder: ir.IRBuilder, vector: ir.Value) -> Any:
    for width in (4, 2, 1):
        low, high = (
            builder.shuffle_vector(
                vector, vector, ir.Constant(ir.VectorType(I32, width), list(range(start, start + width)))
            )
            for start in (0, width)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(I32, 0))


# exp(x) = 2**n * exp(r) with n the integer next to x / log(2) and |r| <= log(2) / 2. The first part of log(2) is so
# short that its product with n is exact. Source of parts and polynomial: expf of the Cephes library (Moshier).
_LOG2_E = 1.4426950408889634
_LOG_2_HIGH = 0.693359375
_LOG_2_LOW = -2.12194440054690583e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LEAST, _EXP_MOST = -104.0, 89.0
_ROUND = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer, half to even


def _exp(builder: ir.IRBuilder, x: ir.Value) -> Any:
    kind = x.type
    bits = ir.VectorType(I32, LANES) if isinstance(kind, ir.VectorType) else I32

    def constant(number: float) -> Any:
        return constant_of(kind, number)

    def power_of_two(exponent: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(exponent, constant_of(bits, 127)), constant_of(bits, 23)), kind)

    limited = builder.select(builder.fcmp_ordered("<", x, constant(_EXP_LEAST)), constant(_EXP_LEAST), x)
    limited = builder.select(builder.fcmp_ordered(">", limited, constant(_EXP_MOST)), constant(_EXP_MOST), limited)
    n = builder.fsub(builder.fadd(builder.fmul(limited, constant(_LOG2_E)), constant(_ROUND)), constant(_ROUND))
    r = _fma(builder, n, constant(-_LOG_2_HIGH), limited)
    r = _fma(builder, n, constant(-_LOG_2_LOW), r)
    p = constant(_EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = _fma(builder, p, r, constant(term))
    p = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), constant(1.0))
    # In two steps, for n may lie outside what one exponent can say; a NaN has no integer, and any will do.
    integer = builder.fptosi(builder.select(builder.fcmp_ordered("ord", x, x), n, constant(0.0)), bits)
    half = builder.ashr(integer, constant_of(bits, 1))
    p = builder.fmul(p, power_of_two(half))
    return builder.fmul(p, power_of_two(builder.sub(integer, half)))


fma = _operation("fma", _fma, "``a * b + c``, rounded once.", 3)
add = _operation("add", lambda builder, a, b: builder.fadd(a, b), "``a + b``.", 2)
sub = _operation("sub", lambda builder, a, b: builder.fsub(a, b), "``a - b``.", 2)
mul = _operation("mul", lambda builder, a, b: builder.fmul(a, b), "``a * b``.", 2)
div = _operation("div", lambda builder, a, b: builder.fdiv(a, b), "``a / b``.", 2)
maximum = _operation("maximum", _maximum, "The larger one; `b` where either is NaN.", 2)
exp = _operation(
    "exp", _exp, "The exponential, within 1.5 units in the last place; subnormal results within one unit.", 1
)


@intrinsic
def broadcast(typing: Any, number: Any) -> Any:
    """A float32 in every lane."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return splat_of(builder, arguments[0], _F32X8)

    return f32x8(types.float32), emit


@intrinsic
def sum_lanes(typing: Any, vector: Any) -> Any:
    """The sum of the lanes: those four apart first, then those two apart, then the last two."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return _sum_pairwise(builder, arguments[0])

    return types.float32(f32x8), emit


@intrinsic
def lane(typing: Any, vector: Any, index: Any) -> Any:
    """One lane of a vector."""

    def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.extract_element(arguments[0], builder.trunc(arguments[1], I32))

    return types.float32(f32x8, types.intp), emit


@device
def sigmoid(x: Any, one: Any) -> Any:
    """``1 / (1 + exp(-x))``; `x` is ``f32x8`` or ``float32``, and `one` is 1 in its type."""
    return div(one, add(one, exp(sub(sub(one, one), x))))
