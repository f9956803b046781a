// Addition in place.
#include "numerics.cuh"

// residual[i] += x[i] for i < n, one number a thread.
template <typename T>
__global__ void add(T* residual, const T* x, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) residual[i] = narrow<T>(widen(residual[i]) + widen(x[i]));
}
