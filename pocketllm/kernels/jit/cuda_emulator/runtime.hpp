// What a kernel's translation unit, the scheduler and the checker know of each other.
#pragma once
#include <cstddef>
#include <cstdint>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

constexpr unsigned kWarp = 32;

// A place in a kernel's source: of what the compiler calls a function, by file and line, for it may double or merge
// the calls; of an access to memory, by the address of the instruction, which the caller looks up.
struct Site {
  const char* file;
  int line;
  uintptr_t instruction;
};

// A thread and what it does there. Python reads these structures: see faults.py.
struct Actor {
  dim3 block, thread;
  Site site;  // without file and instruction: the thread has returned
  int writes;
};

enum class FaultKind : int {
  none, memory, barrier, lane_missing, lane_outside, source_outside, bounds, race, misaligned, nowhere, width, distance,
  crash, stack, interrupt
};

struct Fault {
  FaultKind kind;
  unsigned mask;  // of a warp operation
  int lane;       // of a warp operation: the one that is missing or read; of `width` and `distance`: what was given
  int region;     // of an access: its place in the list of `Region`s
  int signal;     // of a crash
  int64_t offset; // of an access: bytes from the start of the region
  int64_t bytes;  // of an access
  uint64_t address;  // of an access nowhere, and of a crash that has one
  Actor first, second;
};

// Memory that a kernel may use.
struct Region {
  uintptr_t start;  // of the variables in shared memory, until the launch: from `shared_anchor` on
  size_t bytes;
  int shared;  // each block has its own
};

// Defined in each kernel's translation unit: one thread of it, with arguments at 8 bytes each.
void run_thread(const uint64_t* arguments);

// Meeting points of threads; see runtime.cpp.
void barrier(Site site);
uint64_t exchange(unsigned mask, uint64_t value, int source, Site site);
unsigned vote(unsigned mask, bool predicate, Site site);
unsigned lane_index();
void refuse_shuffle(FaultKind kind, int given, Site site);  // does not return

#ifdef EMULATOR_CHECKED
void atomic_access(void* address, size_t bytes);
#else
inline void atomic_access(void*, size_t) {}
#endif

}  // namespace emulator
