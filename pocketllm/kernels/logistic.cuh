// The logistic function and its integral, the same bits on a GPU and in the emulator.
#pragma once
#include "numerics.cuh"

// 1 / (1 + exp(-x)). The exponential is of a negative number only, so that nothing overflows.
__device__ __forceinline__ float sigmoid(float x) {
  const float decay = exponential(-fabsf(x));
  return (x >= 0.0f ? 1.0f : decay) / (1.0f + decay);
}

// log(1 + exp(x)), accurate where it is next to zero and where it is next to x.
//
// With p = exp(-|x|), log(1 + p) is 2 atanh(r) for r = p / (2 + p) <= 1/3, and the series r (1 + r^2 / 3 + r^4 / 5 +
// ...) has no terms that cancel. What is left out is 2e-9 of it.
__device__ __forceinline__ float softplus(float x) {
  const float power = exponential(-fabsf(x));
  const float ratio = power / (2.0f + power), square = ratio * ratio;
  float series = 1.0f / 15;
  series = fmaf(series, square, 1.0f / 13);
  series = fmaf(series, square, 1.0f / 11);
  series = fmaf(series, square, 1.0f / 9);
  series = fmaf(series, square, 1.0f / 7);
  series = fmaf(series, square, 1.0f / 5);
  series = fmaf(series, square, 1.0f / 3);
  series = fmaf(series, square, 1.0f);
  return (x > 0.0f ? x : 0.0f) + 2.0f * ratio * series;
}
