// RMSNorm: one block a row.
#include "numerics.cuh"
#include "reductions.cuh"

// Rows of n numbers in x, residual and out; `offset` is added to weight [n]. A residual that is not null takes x first,
// and is what is normalised. For blocks of kThreads threads.
template <typename T, int kThreads>
__global__ void rms_norm(const T* x, T* residual, const float* weight, T* out, int n, float eps,
                         float offset) {
  const long long row = static_cast<long long>(blockIdx.x) * n;
  const T* from = x + row;
  if (residual != nullptr) {
    from = residual + row;
    // Each thread adds what it reads again below, so that there is nothing to wait for.
    for (int i = threadIdx.x; i < n; i += kThreads) {
      residual[row + i] = narrow<T>(widen(x[row + i]) + widen(residual[row + i]));
    }
  }
  float squares = 0.0f;
  for (int i = threadIdx.x; i < n; i += kThreads) squares = fmaf(widen(from[i]), widen(from[i]), squares);
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(squares) / n + eps);
  for (int i = threadIdx.x; i < n; i += kThreads) out[row + i] = narrow<T>(widen(from[i]) * scale * (weight[i] + offset));
}
