// Scores of logits, in two kernels: `survey` shares a row out to many blocks, `merge` puts its segments together.
//
// Segments lie at fixed columns, and every sum has one order.
#include "candidates.cuh"
#include "numerics.cuh"

// Comes before every candidate.
__device__ __forceinline__ Candidate before_all() { return {infinity(), -1}; }

// Of the candidates read(threadIdx.x), read(threadIdx.x + kThreads) and so on below `count`, the first that is above
// minus infinity and comes after `taken`.
template <int kThreads, typename Read>
__device__ __forceinline__ Candidate first_after(Candidate taken, Read read, int count) {
  Candidate first = no_candidate();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const Candidate next = read(i);
    if (next.value > -infinity() && precedes(taken, next)) first = first_of(first, next);
  }
  return first;
}

// The first k of the candidates read(0) up to read(count), in order; id -1 and minus infinity where there are fewer.
// `own` is the thread's first; the thread whose candidate was taken looks for its next.
template <int kThreads, typename Read>
__device__ __forceinline__ void take_first(Candidate own, Read read, int count, int k, int* ids, float* logits) {
  for (int place = 0; place < k; ++place) {
    const Candidate taken = block_first<kThreads>(own);
    if (threadIdx.x == 0) {
      ids[place] = taken.id == kNoId ? -1 : taken.id;
      logits[place] = static_cast<float>(taken.value);
    }
    if (own.id == taken.id && taken.id != kNoId) own = first_after<kThreads>(taken, read, count);
  }
}

// Of each segment of kSegment columns of rows of n logits: its largest number, the sum of exp(logit - largest) and its
// k largest, to arrays of [rows, segments] and [rows, segments, k]. Block (r, s) takes segment s of row r.
template <typename T, int kThreads, int kSegment>
__global__ void survey(const T* logits, float* tops, float* sums, int* ids, float* largest, int n, int k) {
  const int begin = blockIdx.y * kSegment, count = min(kSegment, n - begin);
  const T* from = logits + static_cast<long long>(blockIdx.x) * n + begin;
  const long long segment = static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y;
  const auto read = [=](int i) -> Candidate { return {widen(from[i]), begin + i}; };
  const Candidate own = first_after<kThreads>(before_all(), read, count);
  const float top = static_cast<float>(block_first<kThreads>(own).value);
  float sum = 0.0f;
  if (fabsf(top) < infinity()) {
    for (int i = threadIdx.x; i < count; i += kThreads) sum += exponential(widen(from[i]) - top);
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) {
    tops[segment] = top;
    sums[segment] = sum;
  }
  take_first<kThreads>(own, read, count, k, ids + segment * k, largest + segment * k);
}

// In every lane, log(sum of exp) of a row from its segments' largest numbers and sums. All lanes of a warp call.
__device__ float log_sum_exp(const float* tops, const float* sums, int segments) {
  float top = static_cast<float>(-infinity());
  for (int i = threadIdx.x % kWarp; i < segments; i += kWarp) top = tops[i] > top ? tops[i] : top;
  top = warp_max(top);
  if (!(fabsf(top) < infinity())) return top;
  double sum = 0.0;
  for (int i = threadIdx.x % kWarp; i < segments; i += kWarp) {
    sum += static_cast<double>(sums[i]) * exponential(tops[i] - top);
  }
  return static_cast<float>(top + log(warp_sum(sum)));
}

// The scores of each row, one block a row, from what `survey` has left of its segments. A target below 0 is none, and
// its logit NaN.
template <typename T, int kThreads>
__global__ void merge(const T* logits, const int* targets, const float* tops, const float* sums, const int* ids,
                      const float* largest, float* logsumexp, float* target_logit, int* top_ids, float* top_logits,
                      int n, int segments, int k) {
  const long long row = blockIdx.x;
  const float lse = log_sum_exp(tops + row * segments, sums + row * segments, segments);
  if (threadIdx.x == 0) {
    const int target = targets[row];
    logsumexp[row] = lse;
    target_logit[row] = target < 0 ? __int_as_float(0x7fc00000) : widen(logits[row * n + target]);
  }
  const int* row_ids = ids + row * segments * k;
  const float* row_largest = largest + row * segments * k;
  const auto read = [=](int i) -> Candidate { return {row_largest[i], row_ids[i]}; };
  const Candidate own = first_after<kThreads>(before_all(), read, segments * k);
  take_first<kThreads>(own, read, segments * k, k, top_ids + row * k, top_logits + row * k);
}
