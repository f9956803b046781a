// Rotary angles. Cosines and sines are those of float64, of angles that are float32 by definition.

// Angles [tokens][2][pairs] from frequencies [pairs], in radians a position, over divisors [pairs] if any. kDynamic: a token's length, in tokens,
// stretches the frequencies beyond the original length. For a grid of tokens and of pieces of their pairs.
template <bool kDynamic>
__global__ void rotary_angles(
    const int* positions, const int* lengths, const float* frequencies, const float* divisors, float* out, int pairs,
    double attention_factor, double dynamic_factor, int original_length) {
  const int pair = blockIdx.y * blockDim.x + threadIdx.x;
  if (pair >= pairs) return;
  const long long token = blockIdx.x;
  float frequency = divisors == nullptr ? frequencies[pair] : frequencies[pair] / divisors[pair];
  if (kDynamic) {
    const double length = max(lengths[token], original_length);
    const double growth = dynamic_factor * length / original_length - (dynamic_factor - 1.0);
    frequency = static_cast<float>(frequency * pow(growth, -2.0 * pair / max(2 * pairs - 2, 1)));
  }
  const double angle = static_cast<float>(positions[token]) * frequency;  // a float32 product
  out[token * 2 * pairs + pair] = static_cast<float>(cos(angle) * attention_factor);
  out[(token * 2 + 1) * pairs + pair] = static_cast<float>(sin(angle) * attention_factor);
}
