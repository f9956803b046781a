// The CUDA C++ that kernels are written in, for a host compiler. What it lacks is not emulated: inline PTX, asynchronous
// copies, tensor cores, textures, grids that synchronise, waiting for another thread in a loop. Variables in device
// memory (`__device__` and `static` ones that are not constant) are refused. The bounds of constants and of a thread's
// own variables are not checked.
#pragma once
#include <cmath>
#include <cstring>

#include "runtime.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Blocks run one after another. Nothing else in a library is local to the host's thread, so that these variables are
// found by it, whatever function or file they are declared in.
#define __shared__ static __thread
#define __constant__ static const

#ifdef EMULATOR_CHECKED
extern "C" void* memcpy(void*, const void*, size_t) noexcept __asm__("emulator_copy");
extern "C" void* memmove(void*, const void*, size_t) noexcept __asm__("emulator_copy");
extern "C" void* memset(void*, int, size_t) noexcept __asm__("emulator_set");
#endif

#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(emulator::dynamic_shared)

// Constant as far as a thread can see; runtime.cpp sets them whenever it lets a thread go on.
extern const dim3 threadIdx, blockIdx, blockDim, gridDim;
namespace emulator {
extern char* const dynamic_shared;
}
constexpr int warpSize = emulator::kWarp;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(4) uchar4 { unsigned char x, y, z, w; };
struct alignas(4) char4 { signed char x, y, z, w; };

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {

template <typename To, typename From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits are reinterpreted between types of one size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

// The default argument of a function, evaluated where that is called.
inline Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line, 0}; }

template <typename T>
inline T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = exchange(mask, bits, source, site);
  T result;
  __builtin_memcpy(&result, &bits, sizeof(T));
  return result;
}

// Results of other widths, and of distances that leave the warp, are undefined.
inline void check_shuffle(unsigned distance, int width, Site site) {
  if (width < 1 || width > static_cast<int>(kWarp) || (width & (width - 1)) != 0) {
    refuse_shuffle(FaultKind::width, width, site);
  }
  if (distance >= kWarp) refuse_shuffle(FaultKind::distance, static_cast<int>(distance), site);
}

// Fibers change hands at meeting points only, so that a plain operation is atomic.
template <typename T, typename Operation>
__attribute__((noinline, no_sanitize("thread"))) T update(T* address, Operation operation) {
  const T before = *address;
  *address = operation(before);
  return before;
}

}  // namespace emulator

#define POCKETLLM_SITE emulator::Site site = emulator::here(__builtin_FILE(), __builtin_LINE())

inline void __syncthreads(POCKETLLM_SITE) { emulator::barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, POCKETLLM_SITE) { emulator::vote(mask, false, site); }
inline unsigned __ballot_sync(unsigned mask, int predicate, POCKETLLM_SITE) {
  return emulator::vote(mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, POCKETLLM_SITE) {
  return emulator::vote(mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, POCKETLLM_SITE) {
  return emulator::vote(mask, predicate != 0, site) == mask;
}

// Lanes are divided into groups of `width`. A source beyond the group is the lane itself; the one that __shfl_sync
// names is taken modulo `width`.
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, POCKETLLM_SITE) {
  emulator::check_shuffle(0, width, site);
  const int group = emulator::lane_index() & ~(width - 1);
  return emulator::shuffle(mask, value, group | (source & (width - 1)), site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, POCKETLLM_SITE) {
  emulator::check_shuffle(static_cast<unsigned>(lanes), width, site);
  const int lane = emulator::lane_index(), source = lane ^ lanes;
  return emulator::shuffle(mask, value, source < (lane | (width - 1)) + 1 ? source : lane, site);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32, POCKETLLM_SITE) {
  emulator::check_shuffle(lanes, width, site);
  const int lane = emulator::lane_index(), source = lane - static_cast<int>(lanes);
  return emulator::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, site);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32, POCKETLLM_SITE) {
  emulator::check_shuffle(lanes, width, site);
  const int lane = emulator::lane_index(), source = lane + static_cast<int>(lanes);
  return emulator::shuffle(mask, value, source <= (lane | (width - 1)) ? source : lane, site);
}
#undef POCKETLLM_SITE

#define POCKETLLM_ATOMIC(name, result)                                 \
  template <typename T>                                                \
  __forceinline__ T name(T* address, decltype(T()) value) {            \
    emulator::atomic_access(address, sizeof(T));                       \
    return emulator::update(address, [value](T before) -> T { return result; }); \
  }
POCKETLLM_ATOMIC(atomicAdd, before + value)
POCKETLLM_ATOMIC(atomicMax, before < value ? value : before)
POCKETLLM_ATOMIC(atomicMin, value < before ? value : before)
POCKETLLM_ATOMIC(atomicAnd, before & value)
POCKETLLM_ATOMIC(atomicOr, before | value)
POCKETLLM_ATOMIC(atomicExch, (static_cast<void>(before), value))
#undef POCKETLLM_ATOMIC

template <typename T>
__forceinline__ T atomicCAS(T* address, decltype(T()) expected, decltype(T()) value) {
  emulator::atomic_access(address, sizeof(T));
  return emulator::update(address, [=](T before) -> T { return before == expected ? value : before; });
}

template <typename T> inline T __ldg(const T* address) { return *address; }
inline float __int_as_float(int bits) { return emulator::bits_as<float>(bits); }
inline int __float_as_int(float number) { return emulator::bits_as<int>(number); }
inline float __uint_as_float(unsigned bits) { return emulator::bits_as<float>(bits); }
inline unsigned __float_as_uint(float number) { return emulator::bits_as<unsigned>(number); }
inline double __longlong_as_double(long long bits) { return emulator::bits_as<double>(bits); }
inline long long __double_as_longlong(double number) { return emulator::bits_as<long long>(number); }
inline int __float2int_rn(float number) { return static_cast<int>(rintf(number)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }

// Four products of signed bytes, added to `total`.
inline int __dp4a(int a, int b, int total) {
  for (int shift = 0; shift < 32; shift += 8) {
    total += static_cast<signed char>(a >> shift) * static_cast<signed char>(b >> shift);
  }
  return total;
}

template <typename T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <typename T> constexpr T max(T a, T b) { return a < b ? b : a; }
