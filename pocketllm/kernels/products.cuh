// The outputs of matrix products: how threads share them, and how they are stored.
#pragma once
#include "numerics.cuh"

constexpr int kOwn = 4;  // in a tile a thread has kOwn rows by kOwn columns

// One output [row, column] of `outputs` a row: the sum, plus the column's bias where there are any.
template <typename T>
__device__ __forceinline__ void store(T* out, const float* bias, int row, int column, int outputs, float total) {
  if (bias != nullptr) total += bias[column];
  out[static_cast<long long>(row) * outputs + column] = narrow<T>(total);
}

// Those of a thread, from [row, column] on, as far as there are such rows and columns.
template <typename T>
__device__ __forceinline__ void store_own(T* out, const float* bias, int row, int rows, int column, int outputs,
                                          const float (&totals)[kOwn][kOwn]) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      if (row + i < rows && column + j < outputs) store(out, bias, row + i, column + j, outputs, totals[i][j]);
    }
  }
}
