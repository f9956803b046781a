// Attention over a paged cache.
//
// A tile is up to kRows rows of one sequence that share a key head; a row is a query with one of the heads that attend
// with that key head. A block takes a tile through chunks of kKeys keys: it computes the chunk's scores, a lane for
// each key and a warp for some of the rows, then mixes the chunk's values into the rows, a thread for each number of a
// head.
//
// Chunks and segments start at fixed positions and every sum has one order, so a row's bits depend neither on its place
// in a tile nor on its neighbours. What a chunk hides from a row changes none of its bits: its scaling is 1, its share
// is 0.
//
// Sources. Running softmax: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; tiles: Dao et
// al., "FlashAttention", 2022; segments: Dao et al., "Flash-Decoding for long-context inference", 2023.
#include "dynamic_shared.cuh"
#include "hyperbolic.cuh"
#include "numerics.cuh"
#include "reductions.cuh"
#include "tiles.cuh"

constexpr int kRows = 16;
constexpr int kKeys = kWarp;
constexpr int kShareStride = kRows + 4;

// The rows that a warp of a block of kThreads scores, and the first of this thread's warp.
template <int kThreads>
constexpr int kRowsOfWarp = kRows * kWarp / kThreads;
template <int kThreads>
__device__ __forceinline__ int first_row() {
  return threadIdx.x / kWarp * kRowsOfWarp<kThreads>;
}

// A tile, and the position of its sequence's first token in the batch.
struct Queries : Tile {
  int position;
};

__device__ __forceinline__ Queries find_queries(
    int number, const int* query_start, const int* context_len, int sequences, int group) {
  const Tile tile = find_tile<kRows>(number, query_start, sequences, group);
  return {tile, context_len[tile.sequence] - (tile.stop - tile.start)};
}

// Which of the heads with this key head a row has, and its number in arrays [tokens][heads].
__device__ __forceinline__ int head_of(const Tile& tile, int row, int kv_head, int group) {
  return kv_head * group + (tile.first + row) % group;
}

__device__ __forceinline__ long long index_of(const Tile& tile, int row, int kv_head, int heads, int group) {
  const long long token = tile.start + (tile.first + row) / group;
  return token * heads + head_of(tile, row, kv_head, group);
}

// Positions of the newest and of the oldest key that a row sees; -1 and 0 for a row that is not there.
__device__ __forceinline__ int newest_key(const Queries& tile, int row, int group) {
  return row < tile.rows ? tile.position + (tile.first + row) / group : -1;
}

__device__ __forceinline__ int oldest_key(int newest, int window) {
  return window > 0 ? max(newest - window + 1, 0) : 0;
}

// Keys that some row of a tile sees, and those that all of them see.
struct Span {
  int oldest, newest, common_oldest, common_newest;

  __device__ Span(const Queries& tile, int group, int window) {
    common_newest = newest_key(tile, 0, group);
    newest = newest_key(tile, tile.rows - 1, group);
    oldest = oldest_key(common_newest, window);
    common_oldest = oldest_key(newest, window);
  }
};

// The top score of no keys.
__device__ __forceinline__ float no_score() { return __int_as_float(0xff800000); }

// What a row starts from: a sink is a key whose score is given and whose value is zero.
__device__ __forceinline__ float initial_top(const float* sinks, int head) {
  return sinks != nullptr ? sinks[head] : no_score();
}

__device__ __forceinline__ float initial_mass(const float* sinks) { return sinks != nullptr ? 1.0f : 0.0f; }

// Two reductions over keys become one: its top score, and the scalings of what both have summed.
struct Merge {
  float top, before, added;

  __device__ static Merge of(float top, float other) {
    const float larger = fmaxf(top, other);
    return {larger, exponential(top - larger), exponential(other - larger)};
  }

  __device__ __forceinline__ float operator()(float sum, float other) const {
    return fmaf(other, added, sum * before);
  }
};

// A block's shared memory.
struct Scratch {
  float* shares;     // [kKeys][kShareStride]: of each value in a row
  float* scalings;   // [kRows]: of what a row has so far
  float* additions;  // [kRows]: of what it gets
  float* queries;    // [kRows][stride]
  float* entries;    // [kKeys][stride]: keys or values
  int stride;        // a multiple of 4 and not of 8, so that neighbouring lanes' keys lie in different banks

  __device__ Scratch(float* memory, int dim) {
    shares = memory;
    scalings = shares + kKeys * kShareStride;
    additions = scalings + kRows;
    queries = additions + kRows;
    stride = (dim + 3) / 8 * 8 + 4;
    entries = queries + kRows * stride;
  }
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T numbers[4];
};

// How many threads copy a row: as many as have four numbers each, rounded up to a power of two, or a warp.
__device__ __forceinline__ int lanes_of_row(int dim) { return dim <= 32 ? 8 : dim <= 64 ? 16 : kWarp; }

// The row of `dim` numbers at `from` as float32, with zeros up to a multiple of four; zeros alone where `from` is null.
// By `lanes` threads, of which this is number `lane`. Rows of a multiple of four numbers are aligned like four of them.
template <typename T>
__device__ __forceinline__ void copy_row(const T* from, float* to, int dim, int lane, int lanes) {
  for (int at = 4 * lane; at < dim; at += 4 * lanes) {
    float4 wide = {0.0f, 0.0f, 0.0f, 0.0f};
    if (from != nullptr && dim % 4 == 0) {
      const Four<T> four = *reinterpret_cast<const Four<T>*>(from + at);
      wide = {widen(four.numbers[0]), widen(four.numbers[1]), widen(four.numbers[2]), widen(four.numbers[3])};
    } else if (from != nullptr) {
      wide.x = widen(from[at]);
      if (at + 1 < dim) wide.y = widen(from[at + 1]);
      if (at + 2 < dim) wide.z = widen(from[at + 2]);
      if (at + 3 < dim) wide.w = widen(from[at + 3]);
    }
    *reinterpret_cast<float4*>(to + at) = wide;
  }
}

// A chunk's keys or values. Each lane of a warp knows where that of its key starts; -1 stands for zeros.
template <int kThreads, typename Cache>
__device__ __forceinline__ void load_entries(const Cache* cache, long long start, int dim, const Scratch& scratch) {
  const int lanes = lanes_of_row(dim), lane = threadIdx.x % lanes;
#pragma unroll 4
  for (int key = threadIdx.x / lanes; key < kKeys; key += kThreads / lanes) {
    const long long from = __shfl_sync(kAllLanes, start, key);
    copy_row(from >= 0 ? cache + from : nullptr, scratch.entries + key * scratch.stride, dim, lane, lanes);
  }
}

// Products of a warp's queries with the key of each lane.
template <int kThreads>
__device__ __forceinline__ void multiply(const Scratch& scratch, int dim, float (&products)[kRowsOfWarp<kThreads>]) {
  const float* queries = scratch.queries + first_row<kThreads>() * scratch.stride;
  const float* key = scratch.entries + threadIdx.x % kWarp * scratch.stride;
#pragma unroll
  for (float& product : products) product = 0.0f;
#pragma unroll 2
  for (int at = 0; at < dim; at += 4) {
    const float4 k = *reinterpret_cast<const float4*>(key + at);
#pragma unroll
    for (int row = 0; row < kRowsOfWarp<kThreads>; ++row) {
      const float4 q = *reinterpret_cast<const float4*>(queries + row * scratch.stride + at);
      products[row] = fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, products[row]))));
    }
  }
}

// The running softmax of a warp's rows over a segment of keys.
template <int kThreads>
struct Softmax {
  static constexpr int kCount = kRowsOfWarp<kThreads>;
  float top[kCount];
  float mass[kCount];  // of each lane's own keys, until they are gathered
  bool seen[kCount];   // whether the row sees any of the keys

  __device__ Softmax() : mass{}, seen{} {
#pragma unroll
    for (float& score : top) score = no_score();
  }

  // Takes the scores of the chunk that starts at position `start`, and leaves its shares and scalings. For each row,
  // `newest` is the last position that it sees.
  __device__ void add(
      const float (&scores)[kCount], const int (&newest)[kCount], int window, int start, const Scratch& scratch) {
    const int lane = threadIdx.x % kWarp, position = start + lane;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = first_row<kThreads>() + i, oldest = oldest_key(newest[i], window);
      float scaling = 1.0f, share = 0.0f;
      if (start <= newest[i] && start + kKeys > oldest) {
        const float score = position <= newest[i] && position >= oldest ? scores[i] : no_score();
        const float new_top = fmaxf(top[i], warp_max(score));
        scaling = exponential(top[i] - new_top);
        share = exponential(score - new_top);
        mass[i] = fmaf(mass[i], scaling, share);
        top[i] = new_top;
        seen[i] = true;
      }
      if (lane == 0) scratch.scalings[row] = scaling;
      scratch.shares[lane * kShareStride + row] = share;
    }
  }

  __device__ void gather() {
#pragma unroll
    for (float& sum : mass) sum = warp_sum(sum);
  }
};

// Adds a chunk's values, each times its share, to this thread's number of every row. `kGuarded`: some row does not see
// some of the keys, and their values, which may not be finite, must not reach it even times zero.
template <bool kGuarded>
__device__ __forceinline__ void mix(const Scratch& scratch, int rows, int dim, float (&mixed)[kRows]) {
  if (threadIdx.x >= dim) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) mixed[row] *= scratch.scalings[row];
#pragma unroll 2
  for (int key = 0; key < kKeys; ++key) {
    const float value = scratch.entries[key * scratch.stride + threadIdx.x];
#pragma unroll
    for (int first = 0; first < kRows; first += 4) {
      if (first >= rows) break;
      const float4 four = *reinterpret_cast<const float4*>(scratch.shares + key * kShareStride + first);
      const float shares[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!kGuarded || shares[i] != 0.0f) mixed[first + i] = fmaf(shares[i], value, mixed[first + i]);
      }
    }
  }
}

// The cache of one sequence, for one key head.
template <typename Cache>
struct Entries {
  const Cache* keys;
  const Cache* values;
  const int* blocks;
  int block_size, kv_head, kv_heads, dim;

  // Where the entry of a position starts.
  __device__ __forceinline__ long long start(int position) const {
    const long long slot = static_cast<long long>(blocks[position / block_size]) * block_size + position % block_size;
    return (slot * kv_heads + kv_head) * dim;
  }
};

struct Scoring {
  int window;
  float scale, softcap;

  __device__ __forceinline__ float operator()(float product) const {
    const float score = product * scale;
    return softcap > 0.0f ? softcap * hyperbolic_tangent(score / softcap) : score;
  }
};

// Reduces the keys from position `begin` up to `end` of those that a tile sees; `newest` as in `Softmax::add`.
template <int kThreads, typename Cache>
__device__ __forceinline__ void reduce(
    int begin, int end, const Entries<Cache>& cache, const Span& span, const Scoring& scoring, int rows,
    const int (&newest)[kRowsOfWarp<kThreads>], const Scratch& scratch, Softmax<kThreads>& softmax,
    float (&mixed)[kRows]) {
  end = min(end, span.newest + 1);
  for (int start = max(begin, span.oldest / kKeys * kKeys); start < end; start += kKeys) {
    // Other entries of the table and other slots may hold anything, and are not read.
    const int position = start + threadIdx.x % kWarp;
    const long long entry = position >= span.oldest && position <= span.newest ? cache.start(position) : -1;
    __syncthreads();  // the last chunk's values are read
    load_entries<kThreads>(cache.keys, entry, cache.dim, scratch);
    __syncthreads();
    if (first_row<kThreads>() < rows) {
      float scores[kRowsOfWarp<kThreads>];
      multiply<kThreads>(scratch, cache.dim, scores);
#pragma unroll
      for (float& score : scores) score = scoring(score);
      softmax.add(scores, newest, scoring.window, start, scratch);
    }
    __syncthreads();  // the keys are read
    load_entries<kThreads>(cache.values, entry, cache.dim, scratch);
    __syncthreads();
    if (start >= span.common_oldest && start + kKeys - 1 <= span.common_newest) {
      mix<false>(scratch, rows, cache.dim, mixed);
    } else {
      mix<true>(scratch, rows, cache.dim, mixed);
    }
  }
  softmax.gather();
  __syncthreads();  // the scalings are read
}

// What the segments of a tile's keys leave together.
template <int kThreads>
struct Whole {
  static constexpr int kCount = kRowsOfWarp<kThreads>;
  float top[kCount], mass[kCount];  // of the warp's rows
  float mixed[kRows];               // this thread's number of each row

  __device__ Whole(const float* sinks, const Tile& tile, int kv_head, int group) : mixed{} {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      top[i] = initial_top(sinks, head_of(tile, first_row<kThreads>() + i, kv_head, group));
      mass[i] = initial_mass(sinks);
    }
  }

  // Takes a segment's reduction. A row that saw none of its keys stays as it is.
  __device__ void add(const Softmax<kThreads>& softmax, const float (&added)[kRows], const Scratch& scratch) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Merge merge = {top[i], 1.0f, 0.0f};
      if (softmax.seen[i]) merge = Merge::of(top[i], softmax.top[i]);
      top[i] = merge.top;
      mass[i] = merge(mass[i], softmax.mass[i]);
      if (threadIdx.x % kWarp == 0) {
        scratch.scalings[first_row<kThreads>() + i] = merge.before;
        scratch.additions[first_row<kThreads>() + i] = merge.added;
      }
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      mixed[row] = Merge{0.0f, scratch.scalings[row], scratch.additions[row]}(mixed[row], added[row]);
    }
  }

  // Divides each row by its mass.
  __device__ void finish(const Scratch& scratch) {
    __syncthreads();  // the scalings are read
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % kWarp == 0) scratch.scalings[first_row<kThreads>() + i] = mass[i];
    }
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) mixed[row] /= scratch.scalings[row];
  }
};

// Writes this thread's number of every row; `place(row)` is where a row starts.
template <typename T, typename Place>
__device__ __forceinline__ void store_rows(const float (&mixed)[kRows], int rows, int dim, Place place) {
  if (threadIdx.x >= dim) return;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row < rows) place(row)[threadIdx.x] = narrow<T>(mixed[row]);
  }
}

// Writes a segment's reduction: mixed values, top and mass of each row.
template <int kThreads, typename Place>
__device__ __forceinline__ void store_part(
    const Softmax<kThreads>& softmax, const float (&mixed)[kRows], int rows, int dim, Place place) {
  store_rows<float>(mixed, rows, dim, place);
#pragma unroll
  for (int i = 0; i < kRowsOfWarp<kThreads>; ++i) {
    const int row = first_row<kThreads>() + i;
    if (threadIdx.x % kWarp == 0 && row < rows) {
      place(row)[dim] = softmax.top[i];
      place(row)[dim + 1] = softmax.mass[i];
    }
  }
}

// For blocks of kThreads, heads of up to kThreads numbers, and a grid of tiles, key heads and segments of kSegment
// keys. A segment's reduction goes to parts [tokens][heads][segments][dim + 2], for merge_segments. Where parts is null
// the grid has one segment, and each block takes all of its tile's in order and finishes the rows, with the same bits.
template <typename T, typename Cache, int kThreads, int kSegment>
__global__ void __launch_bounds__(kThreads, 1) attend(
    const T* q, const Cache* key_cache, const Cache* value_cache, const float* sinks, const int* query_start,
    const int* context_len, const int* block_table, T* out, float* parts, int sequences, int table_width,
    int block_size, int heads, int dim, int window, float scale, float softcap) {
  static_assert(kSegment % kKeys == 0, "a segment consists of whole chunks");
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, group = heads / kv_heads;
  const Queries tile = find_queries(blockIdx.x, query_start, context_len, sequences, group);
  if (tile.rows <= 0) return;
  const Span span(tile, group, window);
  int segment = span.oldest / kSegment, last_segment = span.newest / kSegment;
  if (parts != nullptr) {
    const int own = blockIdx.z;
    if (own < segment || own > last_segment) return;
    segment = last_segment = own;
  }
  const int* blocks = block_table + static_cast<long long>(tile.sequence) * table_width;
  const Entries<Cache> cache = {key_cache, value_cache, blocks, block_size, kv_head, kv_heads, dim};
  DYNAMIC_SHARED(float, memory);
  const Scratch scratch(memory, dim);
  const auto index = [&](int row) { return index_of(tile, row, kv_head, heads, group); };
  const int lanes = lanes_of_row(dim);
  for (int row = threadIdx.x / lanes; row < kRows; row += kThreads / lanes) {
    const T* from = row < tile.rows ? q + index(row) * dim : nullptr;
    copy_row(from, scratch.queries + row * scratch.stride, dim, threadIdx.x % lanes, lanes);
  }
  int newest[kRowsOfWarp<kThreads>];
#pragma unroll
  for (int i = 0; i < kRowsOfWarp<kThreads>; ++i) newest[i] = newest_key(tile, first_row<kThreads>() + i, group);

  Whole<kThreads> whole(sinks, tile, kv_head, group);
  for (; segment <= last_segment; ++segment) {
    Softmax<kThreads> softmax;
    float mixed[kRows] = {};
    const int begin = segment * kSegment;
    reduce(begin, begin + kSegment, cache, span, {window, scale, softcap}, tile.rows, newest, scratch, softmax, mixed);
    if (parts != nullptr) {
      store_part(softmax, mixed, tile.rows, dim, [&](int row) {
        return parts + (index(row) * gridDim.z + segment) * (dim + 2);
      });
      return;
    }
    whole.add(softmax, mixed, scratch);
  }
  whole.finish(scratch);
  store_rows<T>(whole.mixed, tile.rows, dim, [&](int row) { return out + index(row) * dim; });
}

// Merges the parts of attend's segments in order. For a grid of its tiles, key heads and rows of a tile, and blocks of
// a thread for each number of a head.
template <typename T, int kSegment>
__global__ void merge_segments(
    const float* parts, const float* sinks, const int* query_start, const int* context_len, T* out, int sequences,
    int segments, int heads, int dim, int window) {
  const int kv_head = blockIdx.y, row = blockIdx.z, group = heads / gridDim.y, number = threadIdx.x;
  const Queries tile = find_queries(blockIdx.x, query_start, context_len, sequences, group);
  if (row >= tile.rows || number >= dim) return;
  const int newest = newest_key(tile, row, group), oldest = oldest_key(newest, window);
  const long long index = index_of(tile, row, kv_head, heads, group);
  float top = initial_top(sinks, head_of(tile, row, kv_head, group)), mass = initial_mass(sinks), mixed = 0.0f;
#pragma unroll 4
  for (int segment = oldest / kSegment; segment <= newest / kSegment; ++segment) {
    const float* part = parts + (index * segments + segment) * (dim + 2);
    const Merge merge = Merge::of(top, part[dim]);
    top = merge.top;
    mass = merge(mass, part[dim + 1]);
    mixed = merge(mixed, part[number]);
  }
  out[index * dim + number] = narrow<T>(mixed / mass);
}
