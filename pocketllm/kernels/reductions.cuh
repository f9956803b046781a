// Sums and maxima over threads, always in the same order, so that a result's bits depend on the numbers alone.
#pragma once

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// In every lane, the sum over a warp, all of whose lanes call.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// In every lane, the largest number of a warp, all of whose lanes call.
template <typename T>
__device__ __forceinline__ T warp_max(T x) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    const T other = __shfl_xor_sync(kAllLanes, x, lanes);
    x = other > x ? other : x;
  }
  return x;
}

// In every thread, the sum over a block of `kThreads` threads in one dimension, all of which call.
template <int kThreads>
__device__ __forceinline__ float block_sum(float x) {
  static_assert(kThreads % kWarp == 0, "a block consists of whole warps");
  __shared__ float sums[kThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();  // whoever called before has read the sums
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = 0.0f;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += sums[warp];
  return total;
}
