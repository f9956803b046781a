// The sigmoid gate.
#include "logistic.cuh"
#include "numerics.cuh"

// x[i] *= sigmoid(gate[i]) for i < n, one number a thread.
template <typename T>
__global__ void sigmoid_gate(T* x, const T* gate, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = narrow<T>(widen(x[i]) * sigmoid(widen(gate[i])));
}
