// Linear layer over a block-quantised weight, for few rows and for many, with the same bits.
//
// Activations are rounded to int8 first. A group of 32 inputs then is an exact integer and a scale for each part of it,
// and groups are added in ascending order to one total for each output, those of the minima to a second one.
#include "numerics.cuh"
#include "products.cuh"
#include "quantized_linear/formats.cuh"
#include "reductions.cuh"

// x [count * 4] as int8, four to a word of codes [count], with a scale for each 32 and a sum of codes for each 16.
// A scale is max |x| / 127, and NaN where a number is not finite. A thread for each word; count is a multiple of 8.
template <typename T>
__global__ void quantize(const T* x, int* codes, float* scales, int* sums, int count) {
  const int word = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % kFours;
  const float infinity = __uint_as_float(0x7f800000u);
  float numbers[4], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    numbers[i] = word < count ? widen(x[word * 4LL + i]) : 0.0f;
    const float size = numbers[i] == numbers[i] ? fabsf(numbers[i]) : infinity;
    largest = size > largest ? size : largest;
  }
  for (int lanes = kFours / 2; lanes > 0; lanes /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, lanes);
    largest = other > largest ? other : largest;
  }
  const bool finite = largest < infinity;
  const float scale = largest / 127.0f, divisor = scale > 0.0f ? scale : 1.0f;
  unsigned packed = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A scale among the subnormal numbers may be too small by half.
    const int code = finite ? static_cast<int>(fminf(fmaxf(rintf(numbers[i] / divisor), -127.0f), 127.0f)) : 0;
    packed |= (code & 255u) << 8 * i;
    sum += code;
  }
  for (int lanes = kFours / 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  if (word >= count) return;
  codes[word] = packed;
  if (lane == 0) scales[word / kFours] = finite ? scale : __uint_as_float(0x7fc00000u);
  if (lane % (kFours / 2) == 0) sums[word / (kFours / 2)] = sum;
}

// The sum of a part's activation codes; `sums` are the two of the group.
template <typename Format>
__device__ __forceinline__ int sum_of_part(const int* sums, int part) {
  return Format::kParts == 1 ? sums[0] + sums[1] : sums[part];
}

// out [rows, outputs] = the rows that `quantize` has made codes, scales and sums of, times weight [outputs, inputs],
// plus bias [outputs] where it is not null. A warp computes a column of kRows rows, a group of inputs a lane; then a
// lane for each row, or two with minima, adds up the groups. For blocks of kWarps warps.
template <typename Format, typename T, int kRows, int kWarps>
__global__ void few_rows(const int* codes, const float* scales, const int* sums, const Byte* weight, const float* bias,
                         T* out, int rows, int outputs, int inputs) {
  constexpr int kParts = Format::kParts, kPartFours = kFours / kParts;
  constexpr int kTotals = Format::kHasMinima ? 2 * kRows : kRows;
  __shared__ float2 factors[kWarps][kTotals][kWarp * kParts + 1];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int column = blockIdx.x * kWarps + warp, first_row = blockIdx.y * kRows;
  const int own_rows = min(kRows, rows - first_row), groups = inputs / kGroup;
  if (column >= outputs) return;
  float total = 0.0f;  // of row `lane`, or of the minima of row `lane - kRows`
  for (int start = 0; start < groups; start += kWarp) {
    const int group = start + lane, count = min(kWarp, groups - start);
    __syncwarp();  // every lane has read what lies there
    if (group < groups) {
      const Byte* block = block_of<Format>(weight, column, inputs, group);
      const int within = group % Format::kGroups;
      int weight_codes[kFours];
#pragma unroll
      for (int four = 0; four < kFours; ++four) weight_codes[four] = Format::codes(block, within, four);
      for (int row = 0; row < own_rows; ++row) {
        const long long at = static_cast<long long>(first_row + row) * groups + group;
        const int4* from = reinterpret_cast<const int4*>(codes + at * kFours);
        const int4 first = from[0], second = from[1];
        const int row_codes[kFours] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          int whole = -Format::kOffset * sum_of_part<Format>(sums + 2 * at, part);
#pragma unroll
          for (int four = part * kPartFours; four < (part + 1) * kPartFours; ++four) {
            whole = __dp4a(weight_codes[four], row_codes[four], whole);
          }
          const float scale = Format::scale(block, within, part) * scales[at];
          factors[warp][row][lane * kParts + part] = make_float2(scale, whole);
        }
        if (Format::kHasMinima) {
          const float sum = scales[at] * sum_of_part<Format>(sums + 2 * at, 0);
          factors[warp][kRows + row][lane] = make_float2(sum, Format::minimum(block, within));
        }
      }
    }
    __syncwarp();
    if (lane < kTotals && lane % kRows < own_rows) {
      for (int i = 0; i < count * kParts; ++i) {
        total = fmaf(factors[warp][lane][i].x, factors[warp][lane][i].y, total);
      }
    }
  }
  if (Format::kHasMinima) total += __shfl_down_sync(kAllLanes, total, kRows);
  if (lane < own_rows) store(out, bias, first_row + lane, column, outputs, total);
}

// A group of inputs of kLines rows or columns, codes transposed.
template <int kLines, int kParts>
struct Tile {
  int codes[kFours][kLines + kOwn];
  float scales[kParts][kLines];
};

template <int kThreads, int kLines>
__device__ void read_rows(const int* codes, const float* scales, const int* sums, int first, int rows, int groups,
                          int group, Tile<kLines, 1>& to, int (*sums_to)[kLines]) {
  for (int i = threadIdx.x; i < kLines * kFours; i += kThreads) {
    const int line = i / kFours, four = i % kFours;
    const long long at = static_cast<long long>(first + line) * groups + group;
    const bool inside = first + line < rows;
    to.codes[four][line] = inside ? codes[at * kFours + four] : 0;
    if (four == 0) to.scales[0][line] = inside ? scales[at] : 0.0f;
    if (four < 2) sums_to[four][line] = inside ? sums[at * 2 + four] : 0;
  }
}

template <typename Format, int kThreads, int kLines>
__device__ void read_columns(const Byte* weight, int first, int outputs, int inputs, int group,
                             Tile<kLines, Format::kParts>& to, float* minima) {
  for (int i = threadIdx.x; i < kLines * kFours; i += kThreads) {
    const int line = i / kFours, four = i % kFours, within = group % Format::kGroups;
    const bool inside = first + line < outputs;
    const Byte* block = block_of<Format>(weight, first + line, inputs, group);
    to.codes[four][line] = inside ? Format::codes(block, within, four) : 0;
    if (four < Format::kParts) to.scales[four][line] = inside ? Format::scale(block, within, four) : 0.0f;
    if (Format::kHasMinima && four == 0) minima[line] = inside ? Format::minimum(block, within) : 0.0f;
  }
}

// The same product; a block computes kRows rows by kColumns columns, with a thread for each kOwn by kOwn of them.
template <typename Format, typename T, int kRows, int kColumns>
__global__ void many_rows(const int* codes, const float* scales, const int* sums, const Byte* weight,
                          const float* bias, T* out, int rows, int outputs, int inputs) {
  constexpr int kAcross = kColumns / kOwn, kThreads = kRows / kOwn * kAcross;
  constexpr int kParts = Format::kParts, kPartFours = kFours / kParts;
  alignas(16) __shared__ Tile<kRows, 1> down;
  alignas(16) __shared__ Tile<kColumns, kParts> across;
  __shared__ int down_sums[2][kRows];
  __shared__ float across_minima[kColumns];
  const int column = threadIdx.x % kAcross * kOwn, row = threadIdx.x / kAcross * kOwn;
  const int first_column = blockIdx.x * kColumns, first_row = blockIdx.y * kRows, groups = inputs / kGroup;
  float totals[kOwn][kOwn] = {}, minima[kOwn][kOwn] = {};
  for (int group = 0; group < groups; ++group) {
    __syncthreads();  // everybody has read what lies there
    read_rows<kThreads>(codes, scales, sums, first_row, rows, groups, group, down, down_sums);
    read_columns<Format, kThreads>(weight, first_column, outputs, inputs, group, across, across_minima);
    __syncthreads();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      int wholes[kOwn][kOwn] = {};
#pragma unroll
      for (int four = part * kPartFours; four < (part + 1) * kPartFours; ++four) {
        const int4 r = *reinterpret_cast<const int4*>(&down.codes[four][row]);
        const int4 c = *reinterpret_cast<const int4*>(&across.codes[four][column]);
        const int of_rows[kOwn] = {r.x, r.y, r.z, r.w}, of_columns[kOwn] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int j = 0; j < kOwn; ++j) wholes[i][j] = __dp4a(of_columns[j], of_rows[i], wholes[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int pair[2] = {down_sums[0][row + i], down_sums[1][row + i]};
        const int sum = sum_of_part<Format>(pair, part);
        const float scale = down.scales[0][row + i];
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const float whole = wholes[i][j] - Format::kOffset * sum;
          totals[i][j] = fmaf(across.scales[part][column + j] * scale, whole, totals[i][j]);
          if (Format::kHasMinima) minima[i][j] = fmaf(scale * sum, across_minima[column + j], minima[i][j]);
        }
      }
    }
  }
  if (Format::kHasMinima) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) totals[i][j] += minima[i][j];
    }
  }
  store_own(out, bias, first_row + row, rows, first_column + column, outputs, totals);
}
