// SwiGLU.
#include "logistic.cuh"

// out[i] = silu(gate[i]) * up[i] for i < n, one number a thread.
template <typename T>
__global__ void swiglu(const T* gate, const T* up, T* out, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float z = widen(gate[i]);
  out[i] = narrow<T>(z * sigmoid(z) * widen(up[i]));
}
