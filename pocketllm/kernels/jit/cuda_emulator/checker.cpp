// Looks at every access to memory that a kernel makes: is it within what the kernel may use, does its address suit its
// size, and is it ordered with every access of another thread to the same byte, where one of them writes?
//
// The compiler calls in here before each access (-fsanitize=thread, with these functions in place of its library's).
// Order is what CUDA promises: a block's accesses before a barrier come before those after it, a warp's likewise for
// its operations, among the lanes that take part (vector clocks, as in Flanagan and Freund, "FastTrack: Efficient and
// Precise Dynamic Race Detection", 2009); between blocks there is none. Of reads only the last one and the last one of
// another thread are remembered, so a race with an earlier one can escape; what is reported is a race, whatever order
// the threads happened to run in.
//
// Variables in shared memory lie a little apart (EMULATOR_SHARED_GAP); what reaches over the gap into another is not found.
#include "checker.hpp"

#include "scheduler.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

extern "C" const char __ehdr_start;  // where this library lies in memory, by the linker

namespace emulator {
namespace {

struct Access {
  uint32_t block;  // from 1; 0: there was none
  uint32_t epoch;  // barriers that the block had passed
  uint32_t clock;  // the thread's own, see `known`
  uint32_t instruction;
  uint16_t thread;
  bool writes, atomic;
};

// The accesses to one byte that later ones are held against.
struct Cell {
  Access write, read, other_read;
};

constexpr unsigned kMostThreads = 1024;
constexpr size_t kMostRegions = 256;
constexpr uint64_t kFar = 64 << 10;  // an access farther from all regions is not told as one past the end of any

const Region* regions;
size_t region_count;
Cell* cells[kMostRegions];  // one a byte of each region, allocated when it is first used

uint32_t block, epoch;
// known[thread][lane]: up to where in the time of that lane of its warp a thread comes after it. A thread's own time
// goes on with each warp operation.
uint32_t known[kMostThreads][kWarp];

bool ordered(const Access& before, const Access& now, bool shared) {
  if (before.block != now.block) return before.block == 0 || shared;
  if (before.thread == now.thread || before.epoch != now.epoch) return true;
  return before.thread / kWarp == now.thread / kWarp && known[now.thread][before.thread % kWarp] >= before.clock;
}

bool races(const Access& before, const Access& now, bool shared) {
  return (before.writes || now.writes) && !(before.atomic && now.atomic) && !ordered(before, now, shared);
}

Actor actor(const Access& access) {
  const Site site{nullptr, 0, access.instruction};
  return {scheduler::block_index(access.block - 1), scheduler::thread_index(access.thread), site, access.writes};
}

void report(FaultKind kind, size_t region, uintptr_t address, size_t bytes, const Access& now, const Access& before) {
  Fault fault{};
  fault.kind = kind;
  fault.address = address;
  fault.region = static_cast<int>(region);
  fault.offset = static_cast<int64_t>(address - regions[region].start);
  fault.bytes = static_cast<int64_t>(bytes);
  fault.first = actor(now);
  fault.second = actor(before);
  scheduler::stop(fault);
}

// How far the end of the access lies from the region; 0 where it lies in it.
uint64_t distance(const Region& region, uintptr_t address, size_t bytes) {
  if (address < region.start) return region.start - address;
  const uint64_t end = address - region.start + bytes;
  return end > region.bytes ? end - region.bytes : 0;
}

size_t nearest_region(uintptr_t address, size_t bytes) {
  size_t nearest = 0;
  for (size_t i = 0; i < region_count; ++i) {
    const uint64_t here = distance(regions[i], address, bytes);
    if (here == 0) return i;
    if (here < distance(regions[nearest], address, bytes)) nearest = i;
  }
  return nearest;
}

void note(Cell& cell, const Access& now) {
  if (now.writes) {
    cell.write = now;
    return;
  }
  if (cell.read.thread != now.thread || cell.read.block != now.block) cell.other_read = cell.read;
  cell.read = now;
}

// `whole`: the access is one instruction, as a GPU has it too, and not one of a copy by bytes.
void check(void* pointer, size_t bytes, bool writes, bool atomic, bool whole, void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (scheduler::is_private(address, writes)) return;
  const unsigned thread = scheduler::current_thread();
  const uintptr_t instruction = reinterpret_cast<uintptr_t>(caller) - reinterpret_cast<uintptr_t>(&__ehdr_start) - 1;
  const Access now{block, epoch, known[thread][thread % kWarp], static_cast<uint32_t>(instruction),
                   static_cast<uint16_t>(thread), writes, atomic};
  const size_t at = nearest_region(address, bytes);
  const Region& region = regions[at];
  const uint64_t outside = distance(region, address, bytes);
  if (outside > kFar + region.bytes) report(FaultKind::nowhere, at, address, bytes, now, now);
  if (outside != 0) report(FaultKind::bounds, at, address, bytes, now, now);
  if (whole && address % bytes != 0) report(FaultKind::misaligned, at, address, bytes, now, now);
  if (cells[at] == nullptr) cells[at] = static_cast<Cell*>(std::calloc(region.bytes, sizeof(Cell)));
  if (cells[at] == nullptr) report(FaultKind::memory, at, address, bytes, now, now);
  for (size_t i = 0; i < bytes; ++i) {
    Cell& cell = cells[at][address - region.start + i];
    for (const Access* before : {&cell.write, &cell.read, &cell.other_read}) {
      if (races(*before, now, region.shared)) report(FaultKind::race, at, address, bytes, now, *before);
    }
    note(cell, now);
  }
}

}  // namespace

namespace checker {

bool launch_starts(const Region* launched, size_t count) {
  regions = launched;
  region_count = count;
  block = 0;
  return count <= kMostRegions;
}

void launch_ends() {
  for (size_t i = 0; i < region_count; ++i) {
    std::free(cells[i]);
    cells[i] = nullptr;
  }
}

void block_starts() {
  ++block;
  epoch = 0;
  std::memset(known, 0, sizeof known);
  for (unsigned thread = 0; thread < kMostThreads; ++thread) known[thread][thread % kWarp] = 1;
}

void barrier_passed() { ++epoch; }

void warp_met(unsigned first_thread, unsigned mask) {
  uint32_t joined[kWarp] = {};
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    for (unsigned i = 0; i < kWarp; ++i) {
      const uint32_t time = known[first_thread + lane][i];
      if (joined[i] < time) joined[i] = time;
    }
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    std::memcpy(known[first_thread + lane], joined, sizeof joined);
    ++known[first_thread + lane][lane];
  }
}

}  // namespace checker

void atomic_access(void* address, size_t bytes) {
  check(address, bytes, true, true, true, __builtin_return_address(0));
}

}  // namespace emulator

// What the compiler calls; see libsanitizer/tsan/tsan_interface.h of GCC.

#define CHECKED_ACCESS(name, bytes, writes, whole)                                  \
  extern "C" void __tsan_##name(void* address) {                                    \
    emulator::check(address, bytes, writes, false, whole, __builtin_return_address(0)); \
  }
#define CHECKED_SIZE(bytes)                                  \
  CHECKED_ACCESS(read##bytes, bytes, false, true)            \
  CHECKED_ACCESS(write##bytes, bytes, true, true)            \
  CHECKED_ACCESS(unaligned_read##bytes, bytes, false, false) \
  CHECKED_ACCESS(unaligned_write##bytes, bytes, true, false)

CHECKED_SIZE(1)
CHECKED_SIZE(2)
CHECKED_SIZE(4)
CHECKED_SIZE(8)
CHECKED_SIZE(16)

extern "C" void __tsan_read_range(void* address, size_t bytes) {
  emulator::check(address, bytes, false, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t bytes) {
  emulator::check(address, bytes, true, false, false, __builtin_return_address(0));
}

// What cuda.hpp calls for memcpy, memmove and memset.
extern "C" void* emulator_copy(void* to, const void* from, size_t bytes) {
  emulator::check(const_cast<void*>(from), bytes, false, false, false, __builtin_return_address(0));
  emulator::check(to, bytes, true, false, false, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
extern "C" void* emulator_set(void* to, int value, size_t bytes) {
  emulator::check(to, bytes, true, false, false, __builtin_return_address(0));
  return std::memset(to, value, bytes);
}

extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
