// Causal convolution of each channel by itself, then SiLU: a thread for a channel of a few rows.
#include "logistic.cuh"
#include "numerics.cuh"
#include "reductions.cuh"
#include "tiles.cuh"

// One channel of a sequence.
template <typename T, int kPast>
struct Channel {
  const T* x;        // its input in the batch's first row
  float* state;      // its place in slot 0
  long long stride;  // channels, from row to row
  int start;         // the sequence's first row
  int slot;          // that the sequence goes on from; -1 where it begins

  __device__ __forceinline__ float* saved(int of) const { return state + of * stride * kPast; }

  // The input of a row, of one before the sequence's first row too.
  __device__ __forceinline__ float input(int row) const {
    if (row >= start) return widen(x[row * stride]);
    return slot >= 0 ? saved(slot)[row - start + kPast] : 0.0f;
  }
};

// The row whose state is put where the sequence's own is read from; -1 where there is none. All lanes of a warp call.
__device__ __forceinline__ int row_saved_in_place(const Tile& tile, int slot, const int* save_slot) {
  int found = -1;
  for (int row = tile.start + static_cast<int>(threadIdx.x) % kWarp; row < tile.stop; row += kWarp) {
    if (save_slot[row] == slot) found = row;
  }
  return warp_max(found);
}

// Rows of `channels` inputs in x and of outputs in out; state [slots][channels][kTaps - 1], weight [channels][kTaps],
// bias [channels] where it is not null. For a grid of tiles and of pieces of a row.
//
// Tiles run at the same time and the first one reads the sequence's state, so it is the first one that overwrites it,
// whichever row is saved there. What else is saved goes where nobody reads.
template <typename T, int kTaps, int kRows>
__global__ void causal_conv1d(
    const T* x, float* state, const int* query_start, const int* state_slot, const int* save_slot, const float* weight,
    const float* bias, T* out, int sequences, int channels) {
  constexpr int kPast = kTaps - 1;
  const Tile tile = find_tile<kRows>(blockIdx.x, query_start, sequences);
  if (tile.rows <= 0) return;
  const int first = tile.start + tile.first, slot = state_slot[tile.sequence];
  const bool reads_state = slot >= 0 && tile.first == 0;
  const int in_place = reads_state ? row_saved_in_place(tile, slot, save_slot) : -1;
  const int channel = blockIdx.y * blockDim.x + threadIdx.x;
  if (channel >= channels) return;

  float* channel_in_slot = state + static_cast<long long>(channel) * kPast;
  const Channel<T, kPast> own = {x + channel, channel_in_slot, channels, tile.start, slot};
  float taps[kTaps], inputs[kPast + kRows];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) taps[tap] = weight[static_cast<long long>(channel) * kTaps + tap];
#pragma unroll
  for (int i = 0; i < kPast + kRows; ++i) inputs[i] = i < kPast + tile.rows ? own.input(first + i - kPast) : 0.0f;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= tile.rows) break;
    float total = bias != nullptr ? bias[channel] : 0.0f;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) total = fmaf(taps[tap], inputs[row + tap], total);
    out[(first + row) * own.stride + channel] = narrow<T>(total * sigmoid(total));
    const int save = save_slot[first + row];
    if (save < 0 || save == slot) continue;
#pragma unroll
    for (int i = 0; i < kPast; ++i) own.saved(save)[i] = inputs[row + 1 + i];
  }
  if (in_place < 0) return;
#pragma unroll
  for (int i = 0; i < kPast; ++i) inputs[i] = own.input(in_place + 1 + i - kPast);
#pragma unroll
  for (int i = 0; i < kPast; ++i) own.saved(slot)[i] = inputs[i];
}
