// Sampling, in three kernels: `settle` and `rate` share a row out to many blocks, `draw` decides with one.
//
// Each cut (top-k, top-p, min-p) keeps the tokens before some point of one order: falling values, equal ones by id. So
// nothing is sorted and no cut is looked for: the token whose logit and noise sum up to the most is the result if it
// lies before the cuts; if it does not, nothing behind it does, and the best of those before it is tried. Where the
// cuts keep a share p of the mass, it takes some 1 + log(1 / p) tokens. Counts and masses are integers, which add up
// to the same in any order.
#include "candidates.cuh"
#include "numerics.cuh"
#include "philox.cuh"

// A token this far below the likeliest has no mass and cannot win: noise spreads over 26.1.
constexpr double kReach = 28.0;

constexpr long long kEverything = 0x7fffffffffffffffll;

// What `shares` and `integers` hold of each row: matrices of [kinds, rows].
enum Share { kTemperature, kTopP, kMinP, kFrequency, kPresence, kRepetition };
enum Integer { kPosition, kTopK };

// In every thread, the sum of the integers of a block of `kThreads` threads in one dimension, all of which call.
template <int kThreads>
__device__ __forceinline__ long long block_total(long long x) {
  __shared__ long long totals[kThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();  // whoever called before has read
  if (threadIdx.x % kWarp == 0) totals[threadIdx.x / kWarp] = x;
  __syncthreads();
  long long total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) total += totals[warp];
  return total;
}

// Whether the mask has the token's bit; every token is allowed where there is no mask.
__device__ __forceinline__ bool is_allowed(const unsigned* mask, int token) {
  return mask == nullptr || (mask[token / 32] >> token % 32 & 1u) != 0;
}

// The sparse adjustments of all rows; `start` is null where there are none.
struct Adjustments {
  const int *start, *ids;
  const float* bias;
  const int* count;
  const bool* seen;
};

// A logit with its bias and penalties.
__device__ __forceinline__ double adjusted(
    double logit, const Adjustments& adjust, int entry, double frequency, double presence, double repetition) {
  logit += adjust.bias[entry];
  if (adjust.seen[entry]) logit = logit > 0.0 ? logit / repetition : logit * repetition;
  const int count = adjust.count[entry];
  logit -= frequency * count;
  return count > 0 ? logit - presence : logit;
}

// Rows of n logits after bias, penalties, mask and temperature to x, and the largest of each segment of kSegment tokens
// to peaks [, segments]: NaN where a logit is NaN or +inf, which spoils the row whatever the mask. Block (r, s) takes
// segment s of row `first` + r, which is row r of x and peaks. `allowed`, null or [rows, words], has a bit a token.
template <typename T, int kThreads, int kSegment>
__global__ void settle(const T* logits, const float* shares, const int* adjust_start, const int* adjust_ids,
                       const float* adjust_bias, const int* adjust_count, const bool* adjust_seen,
                       const unsigned* allowed, double* x, double* peaks, int first, int rows, int n, int words) {
  const int row = first + blockIdx.x, begin = blockIdx.y * kSegment, end = min(begin + kSegment, n);
  const T* from = logits + static_cast<long long>(row) * n;
  double* to = x + static_cast<long long>(blockIdx.x) * n;
  const unsigned* mask = allowed == nullptr ? nullptr : allowed + static_cast<long long>(row) * words;
  const float temperature = shares[kTemperature * rows + row];
  const double divisor = temperature == 0.0f ? 1.0 : temperature;
  bool spoilt = false;
  for (int token = begin + threadIdx.x; token < end; token += kThreads) {
    const double logit = widen(from[token]);
    spoilt |= !(logit < infinity());
    to[token] = is_allowed(mask, token) ? logit / divisor : -infinity();
  }
  if (adjust_start != nullptr) {
    const Adjustments adjust = {adjust_start, adjust_ids, adjust_bias, adjust_count, adjust_seen};
    const double frequency = shares[kFrequency * rows + row], presence = shares[kPresence * rows + row];
    const double repetition = shares[kRepetition * rows + row];
    __syncthreads();  // what is replaced has been written
    for (int entry = adjust.start[row] + threadIdx.x; entry < adjust.start[row + 1]; entry += kThreads) {
      const int token = adjust.ids[entry];
      if (token < begin || token >= end || !is_allowed(mask, token)) continue;
      to[token] = adjusted(widen(from[token]), adjust, entry, frequency, presence, repetition) / divisor;
    }
    __syncthreads();
  }
  Candidate peak = no_candidate();
  for (int token = begin + threadIdx.x; token < end; token += kThreads) peak = first_of(peak, {to[token], token});
  peak = block_first<kThreads>(peak);
  spoilt = block_total<kThreads>(spoilt) > 0;
  if (threadIdx.x == 0) {
    peaks[static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y] = spoilt ? infinity() - infinity() : peak.value;
  }
}

// In every lane, the largest number of a row, NaN if it is spoilt. All lanes of a warp call.
__device__ __forceinline__ double row_top(const double* peaks, int segments) {
  double top = -infinity();
  bool spoilt = false;
  for (int segment = threadIdx.x % kWarp; segment < segments; segment += kWarp) {
    spoilt |= peaks[segment] != peaks[segment];
    top = peaks[segment] > top ? peaks[segment] : top;
  }
  top = warp_max(top);
  return __any_sync(kAllLanes, spoilt) ? infinity() - infinity() : top;
}

// A row that has been settled.
struct Row {
  const double* x;
  int n;
  double top;  // the largest number
  unsigned long long seed;
  int position;

  // The sum of which the largest decides.
  __device__ __forceinline__ Candidate scored(int token) const {
    return {x[token] + gumbel(seed, position, token), token};
  }

  // The integer that stands for a number's likelihood.
  __device__ __forceinline__ long long mass(double value) const {
    return static_cast<long long>(floor(exp(value - top) * 0x1p40));
  }
};

// The token of each segment that has the largest sum, as best_scores and best_ids, and the segment's mass where top-p
// asks for it: [, segments]. Blocks as in `settle`; a row without a token that can be drawn is left out.
template <int kThreads, int kSegment>
__global__ void rate(const double* x, const double* peaks, const unsigned long long* seeds, const int* integers,
                     const float* shares, double* best_scores, int* best_ids, long long* masses, int first, int rows,
                     int n) {
  const int row = first + blockIdx.x, begin = blockIdx.y * kSegment, end = min(begin + kSegment, n);
  const long long segments = static_cast<long long>(blockIdx.x) * gridDim.y;
  const Row own = {x + static_cast<long long>(blockIdx.x) * n, n, row_top(peaks + segments, gridDim.y), seeds[row],
                   integers[kPosition * rows + row]};
  if (!(own.top > -infinity())) return;
  const bool is_greedy = shares[kTemperature * rows + row] == 0.0f, has_nucleus = shares[kTopP * rows + row] < 1.0f;
  Candidate best = no_candidate();
  long long mass = 0;
  for (int token = begin + threadIdx.x; token < end; token += kThreads) {
    const double value = own.x[token];
    if (value < own.top - kReach) continue;
    best = first_of(best, is_greedy ? Candidate{value, token} : own.scored(token));
    if (has_nucleus) mass += own.mass(value);
  }
  best = block_first<kThreads>(best);
  mass = block_total<kThreads>(mass);
  if (threadIdx.x == 0) {
    best_scores[segments + blockIdx.y] = best.value;
    best_ids[segments + blockIdx.y] = best.id;
    masses[segments + blockIdx.y] = mass;
  }
}

// How the numbers of a row lie about a value.
struct Split {
  long long above;     // how many
  double over, under;  // the least of those and the largest of the others
};

template <int kThreads>
__device__ Split split(const Row& row, double value) {
  long long above = 0;
  Candidate over = no_candidate(), under = no_candidate();  // the least number is the first when signs are turned
  for (int token = threadIdx.x; token < row.n; token += kThreads) {
    const double number = row.x[token];
    if (number > value) {
      ++above;
      over = first_of(over, {-number, 0});
    } else {
      under = first_of(under, {number, 0});
    }
  }
  return {block_total<kThreads>(above), -block_first<kThreads>(over).value, block_first<kThreads>(under).value};
}

// The mass of the first k tokens of a row; that of all is `total`.
//
// The k-th is found by bisection: `above` numbers, fewer than k, lie above `high`, which is one of the row, and k or
// more above `low`. It need not be found where exactly k numbers turn out to lie above the middle.
template <int kThreads>
__device__ long long mass_of_first(const Row& row, long long k, long long total) {
  double low = row.top - fmax(kReach, fabs(row.top)), high = row.top;
  if (split<kThreads>(row, low).above < k) return total;  // nothing up to there has mass
  long long above = 0;
  for (double middle = low + (high - low) / 2; low < middle && middle < high; middle = low + (high - low) / 2) {
    const Split about = split<kThreads>(row, middle);
    if (about.above > k) {
      if (about.over == high) break;
      low = middle;
    } else {
      high = about.under;
      above = about.above;
      if (above == k) break;
    }
  }
  long long mass = 0;
  for (int token = threadIdx.x; token < row.n; token += kThreads) {
    if (row.x[token] > high) mass += row.mass(row.x[token]);
  }
  return block_total<kThreads>(mass) + (k - above) * row.mass(high);
}

// What comes before a token.
struct Before {
  long long count, mass;
  Candidate best;  // by its sum with noise
};

template <int kThreads>
__device__ Before before(const Row& row, Candidate place, bool has_nucleus) {
  long long count = 0, mass = 0;
  Candidate best = no_candidate();
  for (int token = threadIdx.x; token < row.n; token += kThreads) {
    const Candidate other = {row.x[token], token};
    if (!precedes(other, place)) continue;
    ++count;
    if (has_nucleus) mass += row.mass(other.value);
    best = first_of(best, row.scored(token));
  }
  return {block_total<kThreads>(count), block_total<kThreads>(mass), block_first<kThreads>(best)};
}

// The token with the largest sum of those that the cuts keep; `best` has the largest of all.
template <int kThreads>
__device__ int drawn(const Row& row, Candidate best, long long total, int top_k, double top_p, double min_p) {
  const double least = min_p > 0.0 ? log(min_p) : -infinity();
  const long long k = top_k > 0 && top_k < row.n ? top_k : kEverything;
  long long share = kEverything;
  if (top_p < 1.0) {
    if (k < kEverything) total = mass_of_first<kThreads>(row, k, total);
    share = static_cast<long long>(ceil(top_p * static_cast<double>(total)));
  }
  while (true) {
    const Candidate place = {row.x[best.id], best.id};
    const bool is_likely = place.value - row.top >= least;
    if (is_likely && k == kEverything && share == kEverything) return best.id;
    const Before prior = before<kThreads>(row, place, top_p < 1.0);
    // The first of all stays in any case.
    if (prior.count == 0 || (is_likely && prior.count < k && prior.mass < share)) return best.id;
    best = prior.best;
  }
}

// The token of each row, out[first + block], from what `settle` and `rate` have left; -1 where there is none.
template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1)  // registers rather than a second block
    draw(const double* x, const double* peaks, const double* best_scores, const int* best_ids, const long long* masses,
         const unsigned long long* seeds, const int* integers, const float* shares, int* out, int first, int rows,
         int n, int segments) {
  const int index = first + blockIdx.x;
  const long long start = static_cast<long long>(blockIdx.x) * segments;
  const Row row = {x + static_cast<long long>(blockIdx.x) * n, n, row_top(peaks + start, segments), seeds[index],
                   integers[kPosition * rows + index]};
  int token = -1;
  if (row.top > -infinity()) {
    Candidate best = no_candidate();
    long long total = 0;
    for (int segment = threadIdx.x; segment < segments; segment += kThreads) {
      best = first_of(best, {best_scores[start + segment], best_ids[start + segment]});
      total += masses[start + segment];
    }
    best = block_first<kThreads>(best);
    total = block_total<kThreads>(total);
    token = best.id;
    if (shares[kTemperature * rows + index] != 0.0f) {
      token = drawn<kThreads>(row, best, total, integers[kTopK * rows + index], shares[kTopP * rows + index],
                              shares[kMinP * rows + index]);
    }
  }
  if (threadIdx.x == 0) out[index] = token;
}
