// Key and value cache writes.
#include "numerics.cuh"

// A token's entry is n numbers; slots [tokens] says where it goes. For a grid of tokens and of pieces of an entry.
template <typename T, typename Cache>
__global__ void kv_write(
    const T* key, const T* value, Cache* key_cache, Cache* value_cache, const long long* slots, int n) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const long long from = static_cast<long long>(blockIdx.x) * n + i, to = slots[blockIdx.x] * n + i;
  key_cache[to] = narrow<Cache>(widen(key[from]));
  value_cache[to] = narrow<Cache>(widen(value[from]));
}
