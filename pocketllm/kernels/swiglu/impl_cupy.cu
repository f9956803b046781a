// SwiGLU.
#include "numerics.cuh"

// out[i] = silu(gate[i]) * up[i] for i < n, one number a thread.
template <typename T>
__global__ void swiglu(const T* gate, const T* up, T* out, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const float z = widen(gate[i]);
  // The exponential of a negative number only, so that nothing overflows.
  const float decay = exponential(-fabsf(z));
  const float sigmoid = (z >= 0.0f ? 1.0f : decay) / (1.0f + decay);
  out[i] = narrow<T>(z * sigmoid * widen(up[i]));
}
