// Gated RMSNorm: one warp a row, which is as long as a head.
#include "logistic.cuh"
#include "numerics.cuh"
#include "reductions.cuh"

// Rows of n numbers in x, gate and out; weight [n]. For blocks of kWarps warps.
template <typename T, int kWarps>
__global__ void gated_rms_norm(
    const T* x, const T* gate, const float* weight, T* out, int rows, int n, float eps) {
  const int row = blockIdx.x * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (row >= rows) return;
  const long long start = static_cast<long long>(row) * n;
  x += start;
  float squares = 0.0f;
  for (int i = lane; i < n; i += kWarp) squares = fmaf(widen(x[i]), widen(x[i]), squares);
  const float scale = 1.0f / sqrtf(warp_sum(squares) / n + eps);
  for (int i = lane; i < n; i += kWarp) {
    const float z = widen(gate[start + i]);
    out[start + i] = narrow<T>(widen(x[i]) * scale * weight[i] * (z * sigmoid(z)));
  }
}
