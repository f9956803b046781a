// Hyperbolic functions, the same bits on a GPU and in the emulator.
#pragma once
#include "numerics.cuh"

// tanh(x) within a few units in the last place.
//
// Near zero 1 - exp(-2x) cancels. Below 0.5 a polynomial stands in: a least-squares fit of tanh(x) / x in powers of x
// squared on Chebyshev nodes, with a relative error of 3e-10 before rounding.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float size = fabsf(x);
  if (size < 0.5f) {
    const float square = x * x;
    float ratio = -0.006615864112973213f;
    ratio = fmaf(ratio, square, 0.021276233717799187f);
    ratio = fmaf(ratio, square, -0.05389375239610672f);
    ratio = fmaf(ratio, square, 0.13332904875278473f);
    ratio = fmaf(ratio, square, -0.33333325386047363f);
    return copysignf(fmaf(ratio * square, size, size), x);
  }
  const float decay = exponential(-2.0f * size);
  return copysignf((1.0f - decay) / (1.0f + decay), x);
}
