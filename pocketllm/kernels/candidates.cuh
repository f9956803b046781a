// Candidates among which a row's first are looked for, and their order: falling values, equal ones by id.
#pragma once

#include "reductions.cuh"

constexpr int kNoId = 0x7fffffff;

__device__ __forceinline__ double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

struct Candidate {
  double value;
  int id;
};

// Comes after every candidate above minus infinity.
__device__ __forceinline__ Candidate no_candidate() { return {-infinity(), kNoId}; }

// Whether `a` comes before `b`; a NaN comes before nothing and nothing before it.
__device__ __forceinline__ bool precedes(Candidate a, Candidate b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}

__device__ __forceinline__ Candidate first_of(Candidate a, Candidate b) { return precedes(b, a) ? b : a; }

// In every thread, the first of the candidates of a block of `kThreads` threads in one dimension, all of which call.
template <int kThreads>
__device__ __forceinline__ Candidate block_first(Candidate x) {
  static_assert(kThreads % kWarp == 0, "a block consists of whole warps");
  __shared__ Candidate firsts[kThreads / kWarp];
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    x = first_of(x, {__shfl_xor_sync(kAllLanes, x.value, lanes), __shfl_xor_sync(kAllLanes, x.id, lanes)});
  }
  __syncthreads();  // whoever called before has read
  if (threadIdx.x % kWarp == 0) firsts[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int warp = 0; warp < kThreads / kWarp; ++warp) x = first_of(x, firsts[warp]);
  return x;
}
