// Block-quantised formats: one struct a format, which reads the groups of 32 values that its blocks consist of.
//
// A stored value is scale * (code - kOffset) + minimum. Layouts: pocketllm/checkpoint/quant.py, which follows the GGUF
// specification. A block begins at an even address, and at a multiple of 4 where its size is one.
//
//   kGroups       groups of a block
//   kBytes        of a block
//   kOffset       subtracted from every code
//   kParts        parts of a group with a scale each, 1 or 2
//   kHasMinima    whether groups have a minimum
//   codes(block, group, four)   codes 4 * four to 4 * four + 3 of a group, a signed byte each, the first one lowest
//   scale(block, group, part)
//   minimum(block, group)
#pragma once
#include "numerics.cuh"

constexpr int kGroup = 32;
constexpr int kFours = kGroup / 4;
constexpr unsigned kLowNibbles = 0x0f0f0f0fu;

using Byte = unsigned char;

// The block with a group of a row [columns] of a matrix.
template <typename Format>
__device__ __forceinline__ const Byte* block_of(const Byte* matrix, long long row, int columns, int group) {
  const int blocks = columns / (kGroup * Format::kGroups);
  return matrix + (row * blocks + group / Format::kGroups) * Format::kBytes;
}

// Four bytes of a block of kBytes, from an even place on, or from a multiple of 4 where blocks lie at such.
template <int kBytes>
__device__ __forceinline__ unsigned read_four(const Byte* at) {
  if (kBytes % 4 == 0) return *reinterpret_cast<const unsigned*>(at);
  const unsigned short* halves = reinterpret_cast<const unsigned short*>(at);
  return halves[0] | static_cast<unsigned>(halves[1]) << 16;
}

__device__ __forceinline__ float read_half(const Byte* at) {
  return widen(float16{*reinterpret_cast<const unsigned short*>(at)});
}

// The lowest four of `bits`, each as bit 4 of a byte.
__device__ __forceinline__ unsigned fifth_bits(unsigned bits) {
  return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
}

// The lower halves of 16 bytes hold the first 16 codes of a group, the upper halves the others.
template <int kBytes>
__device__ __forceinline__ unsigned read_nibbles(const Byte* at, int four) {
  return read_four<kBytes>(at + four % 4 * 4) >> four / 4 * 4 & kLowNibbles;
}

struct OneScale {
  static constexpr int kGroups = 1, kParts = 1;
  static __device__ float scale(const Byte* block, int, int) { return read_half(block); }
};

struct WithoutMinima {
  static constexpr bool kHasMinima = false;
  static __device__ float minimum(const Byte*, int) { return 0.0f; }
};

struct OneMinimum {
  static constexpr bool kHasMinima = true;
  static __device__ float minimum(const Byte* block, int) { return read_half(block + 2); }
};

struct Q4_0 : OneScale, WithoutMinima {
  static constexpr int kBytes = 18, kOffset = 8;
  static __device__ int codes(const Byte* block, int, int four) { return read_nibbles<kBytes>(block + 2, four); }
};

struct Q4_1 : OneScale, OneMinimum {
  static constexpr int kBytes = 20, kOffset = 0;
  static __device__ int codes(const Byte* block, int, int four) { return read_nibbles<kBytes>(block + 4, four); }
};

struct Q5_0 : OneScale, WithoutMinima {
  static constexpr int kBytes = 22, kOffset = 16;
  static __device__ int codes(const Byte* block, int, int four) {
    return read_nibbles<kBytes>(block + 6, four) | fifth_bits(read_four<kBytes>(block + 2) >> 4 * four);
  }
};

struct Q5_1 : OneScale, OneMinimum {
  static constexpr int kBytes = 24, kOffset = 0;
  static __device__ int codes(const Byte* block, int, int four) {
    return read_nibbles<kBytes>(block + 8, four) | fifth_bits(read_four<kBytes>(block + 4) >> 4 * four);
  }
};

struct Q8_0 : OneScale, WithoutMinima {
  static constexpr int kBytes = 34, kOffset = 0;
  static __device__ int codes(const Byte* block, int, int four) { return read_four<kBytes>(block + 2 + 4 * four); }
};

// Q4_K and Q5_K: d, m, then a scale s and a minimum t of six bits for each of 8 groups in 12 bytes; d s and -(m t).
struct SixBits {
  static constexpr int kGroups = 8, kParts = 1;
  static constexpr bool kHasMinima = true;
  static __device__ float scale(const Byte* block, int group, int) {
    const Byte* low = block + 4 + group % 4;
    const int six = group < 4 ? low[0] & 63 : (low[8] & 15) | (low[0] >> 2 & 48);
    return read_half(block) * six;
  }
  static __device__ float minimum(const Byte* block, int group) {
    const Byte* low = block + 8 + group % 4;
    const int six = group < 4 ? low[0] & 63 : low[4] >> 4 | (low[0] >> 2 & 48);
    return -(read_half(block + 2) * six);
  }
};

// The lower halves of 32 bytes hold the codes of one group, the upper halves those of the next.
template <int kBytes>
__device__ __forceinline__ unsigned read_paired_nibbles(const Byte* at, int group, int four) {
  return read_four<kBytes>(at + group / 2 * 32 + four * 4) >> group % 2 * 4 & kLowNibbles;
}

struct Q4_K : SixBits {
  static constexpr int kBytes = 144, kOffset = 0;
  static __device__ int codes(const Byte* block, int group, int four) {
    return read_paired_nibbles<kBytes>(block + 16, group, four);
  }
};

struct Q5_K : SixBits {
  static constexpr int kBytes = 176, kOffset = 0;
  static __device__ int codes(const Byte* block, int group, int four) {
    const unsigned high = read_four<kBytes>(block + 16 + four * 4) >> group & 0x01010101u;
    return read_paired_nibbles<kBytes>(block + 48, group, four) | high << 4;
  }
};

// In each half of a block: 64 bytes with the lower four bits of two groups and of the two after them, 32 bytes with the
// upper two of all four. A scale of int8 for each 16 values, and d behind these.
struct Q6_K : WithoutMinima {
  static constexpr int kGroups = 8, kParts = 2, kBytes = 210, kOffset = 32;
  static __device__ int codes(const Byte* block, int group, int four) {
    const int half = group / 4, within = group % 4;
    const unsigned low = read_four<kBytes>(block + half * 64 + within % 2 * 32 + four * 4) >> within / 2 * 4;
    const unsigned high = read_four<kBytes>(block + 128 + half * 32 + four * 4) >> within * 2;
    return (low & kLowNibbles) | (high & 0x03030303u) << 4;
  }
  static __device__ float scale(const Byte* block, int group, int part) {
    return read_half(block + 208) * static_cast<signed char>(block[192 + group * 2 + part]);
  }
};
