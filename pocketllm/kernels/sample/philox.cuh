// The counter-based random generator Philox4x32-10 (Salmon et al., 2011), for one token id at a time.
#pragma once

// The random word of a token id; philox.py beside this file says how it is keyed.
__device__ __forceinline__ unsigned token_word(unsigned long long seed, int position, int token) {
  unsigned c0 = static_cast<unsigned>(token) / 4, c1 = static_cast<unsigned>(position), c2 = 0, c3 = 0;
  unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const unsigned low0 = c0 * 0xD2511F53u, high0 = __umulhi(c0, 0xD2511F53u);
    const unsigned low1 = c2 * 0xCD9E8D57u, high1 = __umulhi(c2, 0xCD9E8D57u);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const int place = token % 4;
  return place < 2 ? (place == 0 ? c0 : c1) : (place == 2 ? c2 : c3);
}

// Standard Gumbel noise of a token id, from -3.14 to 22.88.
__device__ __forceinline__ double gumbel(unsigned long long seed, int position, int token) {
  return -log(-log((token_word(seed, position, token) + 0.5) * 0x1p-32));
}
