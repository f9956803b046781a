// Linear layer over a float weight, for few rows and for many, with the same bits.
//
// K is cut into segments of kSegment inputs. Products are added in ascending order within a segment, from zero, and
// the segments' sums in ascending order to the total: an order that many threads can share for one row, and that takes
// a thread with a total of its own one addition more a segment.
#include "numerics.cuh"
#include "products.cuh"
#include "reductions.cuh"

constexpr int kSegment = 32;
constexpr int kStride = kSegment + 1;  // in shared memory, so that lanes with a segment each use different banks

// The first `segments` segments of `row` from input `start` on, zeros behind its last input.
template <typename T>
__device__ void read_segments(const T* row, int start, int inputs, int segments, float* to, int thread, int threads) {
  for (int i = thread; i < segments * kSegment; i += threads) {
    const int k = start + i;
    to[i / kSegment * kStride + i % kSegment] = k < inputs ? widen(row[k]) : 0.0f;
  }
}

// out [rows, outputs] = x [rows, inputs] times weight [outputs, inputs], plus bias [outputs] where it is not null.
// A warp computes a column of kRows rows, a segment of inputs a lane; for blocks of kWarps warps.
template <typename T, int kRows, int kWarps>
__global__ void few_rows(const T* x, const T* weight, const float* bias, T* out, int rows, int outputs, int inputs) {
  __shared__ float x_segments[kRows][kWarp * kStride], weight_segments[kWarps][kWarp * kStride];
  __shared__ float sums[kWarps][kRows][kWarp + 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.x * kWarps + warp, first_row = blockIdx.y * kRows;
  const int own_rows = min(kRows, rows - first_row);
  x += static_cast<long long>(first_row) * inputs;
  float total = 0.0f;  // in a row's lane
  for (int start = 0; start < inputs; start += kWarp * kSegment) {
    const int segments = min(kWarp, (inputs - start + kSegment - 1) / kSegment);
    __syncthreads();  // everybody has read what lies there
    for (int row = 0; row < own_rows; ++row) {
      const T* from = x + static_cast<long long>(row) * inputs;
      read_segments(from, start, inputs, segments, x_segments[row], threadIdx.x, kWarps * kWarp);
    }
    if (column < outputs) {
      const T* from = weight + static_cast<long long>(column) * inputs;
      read_segments(from, start, inputs, segments, weight_segments[warp], lane, kWarp);
    }
    __syncthreads();
    if (column >= outputs) continue;
    if (lane < segments) {
      for (int row = 0; row < own_rows; ++row) {
        float sum = 0.0f;
#pragma unroll
        for (int k = lane * kStride; k < lane * kStride + kSegment; ++k) {
          sum = fmaf(x_segments[row][k], weight_segments[warp][k], sum);
        }
        sums[warp][row][lane] = sum;
      }
    }
    __syncwarp();
    if (lane < own_rows) {
      for (int segment = 0; segment < segments; ++segment) total += sums[warp][lane][segment];
    }
  }
  if (column < outputs && lane < own_rows) store(out, bias, first_row + lane, column, outputs, total);
}

// kLines lines of a matrix [lines, inputs] from `first` on, inputs from `start` on, transposed; zeros outside of it.
// A warp reads 8 inputs of 4 lines: whole sectors of memory, and different banks of shared memory.
template <int kThreads, int kLines, typename T>
__device__ void read_tile(const T* matrix, int first, int lines, int start, int inputs, float (*to)[kLines + kOwn]) {
  const int k = start + threadIdx.x % 8;
  for (int line = threadIdx.x / 8; line < kLines; line += kThreads / 8) {
    const T* from = matrix + static_cast<long long>(first + line) * inputs;
#pragma unroll
    for (int ahead = 0; ahead < kSegment; ahead += 8) {
      const bool inside = first + line < lines && k + ahead < inputs;
      to[k - start + ahead][line] = inside ? widen(from[k + ahead]) : 0.0f;
    }
  }
}

// The same product; a block computes kRows rows by kColumns columns, with a thread for each kOwn by kOwn of them.
template <typename T, int kRows, int kColumns>
__global__ void many_rows(const T* x, const T* weight, const float* bias, T* out, int rows, int outputs, int inputs) {
  constexpr int kAcross = kColumns / kOwn, kThreads = kRows / kOwn * kAcross;
  alignas(16) __shared__ float x_tile[kSegment][kRows + kOwn];
  alignas(16) __shared__ float weight_tile[kSegment][kColumns + kOwn];
  const int column = threadIdx.x % kAcross * kOwn, row = threadIdx.x / kAcross * kOwn;
  const int first_column = blockIdx.x * kColumns, first_row = blockIdx.y * kRows;
  float totals[kOwn][kOwn] = {};
  for (int start = 0; start < inputs; start += kSegment) {
    __syncthreads();  // everybody has read what lies there
    read_tile<kThreads, kRows>(x, first_row, rows, start, inputs, x_tile);
    read_tile<kThreads, kColumns>(weight, first_column, outputs, start, inputs, weight_tile);
    __syncthreads();
    float sums[kOwn][kOwn] = {};
#pragma unroll 8
    for (int k = 0; k < kSegment; ++k) {
      const float4 of_x = *reinterpret_cast<const float4*>(&x_tile[k][row]);
      const float4 of_weight = *reinterpret_cast<const float4*>(&weight_tile[k][column]);
      const float down[kOwn] = {of_x.x, of_x.y, of_x.z, of_x.w};
      const float across[kOwn] = {of_weight.x, of_weight.y, of_weight.z, of_weight.w};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) sums[i][j] = fmaf(down[i], across[j], sums[i][j]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) totals[i][j] += sums[i][j];
    }
  }
  store_own(out, bias, first_row + row, rows, first_column + column, outputs, totals);
}
