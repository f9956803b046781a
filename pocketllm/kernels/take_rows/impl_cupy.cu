// Selection of rows.
#include "numerics.cuh"

// out[i] = x[rows[i]] for rows of n numbers: block (i, j) copies blockDim.x numbers of row i.
template <typename T>
__global__ void take_rows(const T* x, const long long* rows, T* out, int n) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column < n) out[static_cast<long long>(blockIdx.x) * n + column] = x[rows[blockIdx.x] * n + column];
}
