// Token embedding: the rows that are looked up, from a table of numbers or of quantised blocks. Block (t, j) computes
// a piece of row t.
#include "numerics.cuh"
#include "quantized_linear/formats.cuh"

// out [tokens, hidden] = table[token_ids] * scale, one number a thread.
template <typename T>
__global__ void look_up(const T* table, const int* token_ids, T* out, int hidden, float scale) {
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= hidden) return;
  const float value = widen(table[static_cast<long long>(token_ids[blockIdx.x]) * hidden + column]);
  out[static_cast<long long>(blockIdx.x) * hidden + column] = narrow<T>(value * scale);
}

// The same from blocks, four numbers a thread; before it is scaled, a number has the bits of checkpoint/quant.py.
template <typename Format, typename T>
__global__ void expand(const Byte* table, const int* token_ids, T* out, int hidden, float scale) {
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 4;
  if (column >= hidden) return;
  const int group = column / kGroup, within = group % Format::kGroups, four = column % kGroup / 4;
  const Byte* block = block_of<Format>(table, token_ids[blockIdx.x], hidden, group);
  const int codes = Format::codes(block, within, four);
  const float step = Format::scale(block, within, four * Format::kParts / kFours);
  T* to = out + static_cast<long long>(blockIdx.x) * hidden + column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value = step * (static_cast<signed char>(codes >> 8 * i) - Format::kOffset);
    if (Format::kHasMinima) value += Format::minimum(block, within);
    to[i] = narrow<T>(value * scale);
  }
}
