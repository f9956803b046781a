// The gated delta rule: a block holds some columns of a value head's state, from a sequence's first row to its last.
//
// kShares lanes hold a column of the state in registers, each some of the keys' numbers, so that what a row reads from
// the state is summed in a thread first and then over few lanes of a warp. A column takes nothing from the others and
// its sums have one order, so a row's bits depend on its own sequence alone.
//
// What does not depend on the state (queries and keys divided by their lengths, decays) the block prepares for a few
// rows at a time.
#include "logistic.cuh"
#include "numerics.cuh"
#include "reductions.cuh"

constexpr int kRows = 8;

// What a sequence's next rows bring to the columns of a block; keys and queries have zeros behind their last number.
template <int kKeys, int kColumns>
struct Rows {
  float queries[kRows][kKeys];
  float keys[kRows][kKeys];
  float values[kRows][kColumns];
  float decays[kRows], betas[kRows];
  int saves[kRows];
};

struct Sizes {
  int key_heads, value_heads, key_dim, value_dim;

  __device__ __forceinline__ long long of_row() const {
    return 2LL * key_heads * key_dim + static_cast<long long>(value_heads) * value_dim;
  }
  __device__ __forceinline__ long long of_slot() const {
    return static_cast<long long>(value_heads) * key_dim * value_dim;
  }
};

// The vector of `size` numbers at `from`, divided by its length and times `scale`. By a warp.
template <int kKeys, typename T>
__device__ __forceinline__ void put_unit(const T* from, int size, float eps, float scale, float* to) {
  constexpr int kOwn = (kKeys + kWarp - 1) / kWarp;
  const int lane = threadIdx.x % kWarp;
  float numbers[kOwn], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int at = i * kWarp + lane;
    numbers[i] = at < size ? widen(from[at]) : 0.0f;
    squares = fmaf(numbers[i], numbers[i], squares);
  }
  const float factor = scale / sqrtf(warp_sum(squares) + eps);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    if (i * kWarp + lane < kKeys) to[i * kWarp + lane] = numbers[i] * factor;
  }
}

// Queries, keys and values of `count` rows, of which `mixed` is the first. By the whole block.
template <int kThreads, int kKeys, int kColumns, typename T>
__device__ __forceinline__ void prepare_vectors(
    const T* mixed, int count, const Sizes& sizes, int head, int first_column, float eps, Rows<kKeys, kColumns>& rows) {
  const int key_head = head / (sizes.value_heads / sizes.key_heads);
  for (int vector = threadIdx.x / kWarp; vector < 2 * count; vector += kThreads / kWarp) {
    const int row = vector / 2;
    const T* query = mixed + row * sizes.of_row() + key_head * sizes.key_dim;
    if (vector % 2 == 0) {
      put_unit<kKeys>(query, sizes.key_dim, eps, 1.0f / sqrtf(sizes.key_dim), rows.queries[row]);
    } else {
      put_unit<kKeys>(query + sizes.key_heads * sizes.key_dim, sizes.key_dim, eps, 1.0f, rows.keys[row]);
    }
  }
  const T* values = mixed + 2 * sizes.key_heads * sizes.key_dim + head * sizes.value_dim + first_column;
  for (int i = threadIdx.x; i < count * kColumns; i += kThreads) {
    const int row = i / kColumns, column = i % kColumns;
    const bool inside = first_column + column < sizes.value_dim;
    rows.values[row][column] = inside ? widen(values[row * sizes.of_row() + column]) : 0.0f;
  }
}

// A lane's share of a column of the state.
template <int kKeys, int kShares>
struct Share {
  static constexpr int kOwn = kKeys / kShares;
  float held[kOwn];

  // The key's number that goes with held[i]: four neighbours, then those of the other lanes.
  __device__ static __forceinline__ int number(int i, int share) { return (i / 4 * kShares + share) * 4 + i % 4; }

  __device__ __forceinline__ void load(const float* column, int share, const Sizes& sizes) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = number(i, share);
      if (at < sizes.key_dim) held[i] = column[static_cast<long long>(at) * sizes.value_dim];
    }
  }

  __device__ __forceinline__ void save(float* column, int share, const Sizes& sizes) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = number(i, share);
      if (at < sizes.key_dim) column[static_cast<long long>(at) * sizes.value_dim] = held[i];
    }
  }

  // One row of the rule; in every lane of the column, what the query reads.
  __device__ __forceinline__ float advance(
      const float* query, const float* key, float value, float decay, float beta, int share) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(key + number(i, share));
      const float k[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        held[i + j] *= decay;
        sums[j] = fmaf(held[i + j], k[j], sums[j]);
      }
    }
    const float correction = (value - of_column(sums)) * beta;
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const float4 keys = *reinterpret_cast<const float4*>(key + number(i, share));
      const float4 queries = *reinterpret_cast<const float4*>(query + number(i, share));
      const float k[4] = {keys.x, keys.y, keys.z, keys.w}, q[4] = {queries.x, queries.y, queries.z, queries.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        held[i + j] = fmaf(k[j], correction, held[i + j]);
        sums[j] = fmaf(held[i + j], q[j], sums[j]);
      }
    }
    return of_column(sums);
  }

  // The sum over the lanes of a column, which lie a warp's columns apart.
  __device__ static __forceinline__ float of_column(const float (&sums)[4]) {
    float total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lanes = kWarp / kShares; lanes < kWarp; lanes *= 2) total += __shfl_xor_sync(kAllLanes, total, lanes);
    return total;
  }
};

// Rows of queries and keys of all key heads, then values of all value heads, in mixed; a and b [rows][value heads];
// state [slots][value heads][key_dim][value_dim]; out [rows][value heads][value_dim]. Keys have up to kKeys numbers.
// For a grid of sequences, value heads and pieces of kColumns columns.
template <typename T, int kKeys, int kShares, int kColumns>
__global__ void gated_delta_rule(
    const T* mixed, const T* a, const T* b, float* state, const int* query_start, const int* state_slot,
    const int* save_slot, const float* a_log, const float* dt_bias, T* out, int key_heads, int value_heads, int key_dim,
    int value_dim, float eps) {
  constexpr int kThreads = kShares * kColumns, kColumnsOfWarp = kWarp / kShares;
  alignas(16) __shared__ Rows<kKeys, kColumns> rows;
  const Sizes sizes = {key_heads, value_heads, key_dim, value_dim};
  const int sequence = blockIdx.x, head = blockIdx.y, first_column = blockIdx.z * kColumns;
  const int lane = threadIdx.x % kWarp, share = lane / kColumnsOfWarp;
  const int own_column = threadIdx.x / kWarp * kColumnsOfWarp + lane % kColumnsOfWarp;
  const int column = first_column + own_column;
  const bool inside = column < value_dim;

  float* column_in_slot = state + static_cast<long long>(head) * key_dim * value_dim + column;
  Share<kKeys, kShares> own = {};
  const int slot = state_slot[sequence];
  if (slot >= 0 && inside) own.load(column_in_slot + slot * sizes.of_slot(), share, sizes);
  const float rate = exponential(a_log[head]);
  const int stop = query_start[sequence + 1];
  for (int first = query_start[sequence]; first < stop; first += kRows) {
    const int count = min(kRows, stop - first);
    __syncthreads();  // everybody has read what lies there
    prepare_vectors<kThreads>(mixed + first * sizes.of_row(), count, sizes, head, first_column, eps, rows);
    if (threadIdx.x < count) {
      const int row = threadIdx.x;
      const long long gate = static_cast<long long>(first + row) * value_heads + head;
      rows.decays[row] = exponential(-rate * softplus(widen(a[gate]) + dt_bias[head]));
      rows.betas[row] = sigmoid(widen(b[gate]));
      rows.saves[row] = save_slot[first + row];
    }
    __syncthreads();
    for (int row = 0; row < count; ++row) {
      const float mixture = own.advance(
          rows.queries[row], rows.keys[row], rows.values[row][own_column], rows.decays[row], rows.betas[row], share);
      if (!inside) continue;
      const long long of_head = static_cast<long long>(first + row) * value_heads + head;
      if (share == 0) out[of_head * value_dim + column] = narrow<T>(mixture);
      if (rows.saves[row] >= 0) own.save(column_in_slot + rows.saves[row] * sizes.of_slot(), share, sizes);
    }
  }
}
