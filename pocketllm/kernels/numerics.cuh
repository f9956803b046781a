// Types and functions whose rounding the contracts count on, the same bits on a GPU and in the emulator.
//
// Neither side has CUDA's headers: 16-bit numbers are their bits, and are converted by arithmetic on these.
#pragma once

// 16 bits of a float32: its sign, its exponent and 7 bits of its mantissa.
struct bfloat16 {
  unsigned short bits;
};

// IEEE 754 binary16.
struct float16 {
  unsigned short bits;
};

__device__ __forceinline__ float widen(float x) { return x; }

__device__ __forceinline__ float widen(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ __forceinline__ float widen(float16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, size = x.bits & 0x7fffu;
  if (size >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (size & 0x3ffu) << 13);  // infinite or NaN
  // As a float32 with the exponent's bias of a float16, 2^112 too small; the product is exact.
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(size << 13) * 0x1p112f));
}

// `narrow<T>(x)` is x rounded to T, half to even; NaN stays NaN.
template <typename T>
__device__ __forceinline__ T narrow(float x);

template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float x) {
  const unsigned bits = __float_as_uint(x);
  if (x != x) return {static_cast<unsigned short>(bits >> 16 | 0x40u)};
  return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <>
__device__ __forceinline__ float16 narrow<float16>(float x) {
  const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  unsigned result;
  if (size > 0x7f800000u) {
    result = 0x7e00u;  // NaN
  } else if (size >= 0x47800000u) {
    result = 0x7c00u;  // 2^16 and more
  } else if (size < 0x38800000u) {
    // Below 2^-14 steps are 2^-24, the last bit of a float32 next to 0.5: an addition rounds to it.
    result = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;
  } else {
    result = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
  }
  return {static_cast<unsigned short>(sign | result)};
}

// exp(x) within 1.5 units in the last place; subnormal results within one unit.
//
// exp(x) = 2^n exp(r) with n the integer next to x / log(2). The first part of log(2) is so short that its product with
// n is exact. Parts and polynomial: expf of the Cephes library (Moshier).
__device__ __forceinline__ float exponential(float x) {
  float limited = x < -104.0f ? -104.0f : x;
  limited = limited > 89.0f ? 89.0f : limited;
  const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even
  const float n = (limited * 1.4426950408889634f + round) - round;
  const float r = fmaf(n, 2.12194440054690583e-4f, fmaf(n, -0.693359375f, limited));
  float p = 1.9875691500e-4f;
  p = fmaf(p, r, 1.3981999507e-3f);
  p = fmaf(p, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 5.0000001201e-1f);
  p = fmaf(p, r * r, r) + 1.0f;
  // In two steps, for n may lie outside what one exponent can say; a NaN has no integer, and any will do.
  const int whole = x == x ? static_cast<int>(n) : 0, half = whole >> 1;
  p *= __int_as_float((half + 127) << 23);
  return p * __int_as_float((whole - half + 127) << 23);
}
