// Rotary position embedding.
#include "numerics.cuh"

// Turns the first numbers of each of a token's heads of dim numbers by angles [tokens][2][pairs], which are cosines and
// sines. Pairs are neighbours, or else halves of what is turned. For a grid of tokens and of pieces of their pairs.
template <typename T, bool kInterleaved>
__global__ void rotary(T* x, const float* angles, int heads, int dim, int pairs) {
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  if (i >= heads * pairs) return;
  const int head = i / pairs, pair = i % pairs;
  const long long token = blockIdx.x;
  const float cosine = angles[token * 2 * pairs + pair], sine = angles[(token * 2 + 1) * pairs + pair];
  T* first = x + (token * heads + head) * dim + (kInterleaved ? 2 * pair : pair);
  T* second = first + (kInterleaved ? 1 : pairs);
  const float a = widen(*first), b = widen(*second);
  *first = narrow<T>(a * cosine - b * sine);
  *second = narrow<T>(b * cosine + a * sine);
}
