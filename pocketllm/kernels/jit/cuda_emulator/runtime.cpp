// Runs a kernel on one thread of the host: the threads of a block are fibers, blocks come one after another.
//
// Fibers change hands at barriers and warp operations only. In what order lanes and warps get their turn is free in
// CUDA; with a seed it is drawn anew each time, so that a kernel which relies on an order gives itself away.
#include "runtime.hpp"

#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "checker.hpp"
#include "fiber.hpp"
#include "scheduler.hpp"
#include "signals.hpp"
#include "stacks.hpp"

#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_poison_memory_region(const volatile void* start, size_t bytes);
#endif

extern "C" const char __ehdr_start;  // where this library lies in memory, by the linker
extern "C" __attribute__((visibility("hidden"))) const char _GLOBAL_OFFSET_TABLE_;  // and where its constants end

// Kernels see them as constants.
dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

char* dynamic_shared;
__thread char shared_anchor;  // the variables in shared memory lie around it, see cuda.hpp

namespace {

constexpr unsigned kMostThreads = 1024;
constexpr int kPoison = 0xff;  // NaN in every format, -1 in integers

enum class State { ready, at_barrier, at_warp, returned };

struct Thread {
  Fiber fiber;
  dim3 index;
  State state;
  Site site;
  // Of the warp operation that it waits in: who takes part, what it gives, and whose value it takes (or all votes).
  unsigned mask;
  uint64_t value;
  int source;
  uint64_t result;
};

constexpr int kVotes = -1;

Thread threads[kMostThreads];
unsigned thread_count, running;
const Stacks* stacks;
Fiber host;  // where the scheduler runs
Fault fault;
const uint64_t* arguments;
uint64_t random_state;  // 0: threads run in order

bool same(const Site& a, const Site& b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

Actor actor(const Thread& thread) {
  const Site nowhere{nullptr, 0, 0};
  return {blockIdx, thread.index, thread.state == State::returned ? nowhere : thread.site, 0};
}

void report(FaultKind kind, const Thread& first, const Thread& second, int lane = 0) {
  fault = Fault{};
  fault.kind = kind;
  fault.mask = first.mask;
  fault.lane = lane;
  fault.first = actor(first);
  fault.second = actor(second);
}

unsigned below(unsigned bound) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return static_cast<unsigned>((random_state >> 32) * bound >> 32);
}

// The numbers below `count` in the order of this turn.
void fill_order(unsigned* order, unsigned count) {
  for (unsigned i = 0; i < count; ++i) order[i] = i;
  if (random_state == 0) return;
  for (unsigned i = count; i > 1; --i) {
    const unsigned other = below(i), kept = order[i - 1];
    order[i - 1] = order[other];
    order[other] = kept;
  }
}

void wait(State state, Site site) {
  Thread& self = threads[running];
  self.state = state;
  self.site = site;
  self.fiber.switch_to(host);
}

void thread_entry() {
  Fiber::entered(host);
  run_thread(arguments);
  threads[running].state = State::returned;
  threads[running].fiber.switch_to(host, true);
}

void start_threads() {
  for (unsigned i = 0; i < thread_count; ++i) {
    Thread& thread = threads[i];
    thread.index = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y));
    thread.state = State::ready;
    thread.fiber.prepare(stacks->stack(i), kStackBytes, thread_entry);
  }
}

bool resume(unsigned i) {
  running = i;
  threadIdx = threads[i].index;
  if (signals::interrupted()) {
    report(FaultKind::interrupt, threads[i], threads[i]);
    return false;
  }
  host.switch_to(threads[i].fiber);
  return fault.kind == FaultKind::none;
}

// The first lane that keeps the operation in which `self` waits from happening; kWarp when all have come.
unsigned missing_lane(const Thread* lanes, unsigned count, const Thread& self) {
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((self.mask >> lane & 1) == 0) continue;
    if (lane >= count || lanes[lane].state != State::at_warp) return lane;
    if (lanes[lane].mask != self.mask || !same(lanes[lane].site, self.site)) return lane;
  }
  return kWarp;
}

bool finish_operation(Thread* lanes, unsigned mask) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (mask >> lane & 1 && lanes[lane].value != 0) votes |= 1u << lane;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    Thread& thread = lanes[lane];
    if (thread.source == kVotes) {
      thread.result = votes;
    } else if (mask >> thread.source & 1) {
      thread.result = lanes[thread.source].value;
    } else {
      report(FaultKind::source_outside, thread, thread, thread.source);
      return false;
    }
    thread.state = State::ready;
  }
  checker::warp_met(static_cast<unsigned>(lanes - threads), mask);
  return true;
}

enum class Progress { some, none, fault };

Progress finish_operations(Thread* lanes, unsigned count) {
  const Thread* stuck = nullptr;
  unsigned missing = 0;
  Progress progress = Progress::none;
  for (unsigned lane = 0; lane < count; ++lane) {
    if (lanes[lane].state != State::at_warp) continue;
    const unsigned absent = missing_lane(lanes, count, lanes[lane]);
    if (absent == kWarp) {
      if (!finish_operation(lanes, lanes[lane].mask)) return Progress::fault;
      progress = Progress::some;
    } else if (stuck == nullptr) {
      stuck = &lanes[lane];
      missing = absent;
    }
  }
  if (progress == Progress::none && stuck != nullptr) {
    report(FaultKind::lane_missing, *stuck, missing < count ? lanes[missing] : *stuck, static_cast<int>(missing));
    if (missing >= count) fault.second.site = {nullptr, 0, 0};
    return Progress::fault;
  }
  return progress;
}

// Until each of its threads has returned or is at a barrier.
bool run_warp(unsigned warp) {
  Thread* lanes = threads + warp * kWarp;
  const unsigned count = thread_count - warp * kWarp < kWarp ? thread_count - warp * kWarp : kWarp;
  for (;;) {
    unsigned order[kWarp];
    fill_order(order, count);
    for (unsigned i = 0; i < count; ++i) {
      if (lanes[order[i]].state == State::ready && !resume(warp * kWarp + order[i])) return false;
    }
    const Progress progress = finish_operations(lanes, count);
    if (progress != Progress::some) return progress == Progress::none;
  }
}

bool release_barrier() {
  const Thread* waiting = nullptr;
  for (unsigned i = 0; i < thread_count && waiting == nullptr; ++i) {
    if (threads[i].state == State::at_barrier) waiting = &threads[i];
  }
  for (unsigned i = 0; i < thread_count; ++i) {
    Thread& thread = threads[i];
    if (thread.state == State::returned || !same(thread.site, waiting->site)) {
      report(FaultKind::barrier, *waiting, thread);
      return false;
    }
  }
  for (unsigned i = 0; i < thread_count; ++i) threads[i].state = State::ready;
  checker::barrier_passed();
  return true;
}

bool run_block() {
  const unsigned warps = (thread_count + kWarp - 1) / kWarp;
  for (;;) {
    unsigned order[kMostThreads / kWarp];
    fill_order(order, warps);
    for (unsigned i = 0; i < warps; ++i) {
      if (!run_warp(order[i])) return false;
    }
    bool all_returned = true;
    for (unsigned i = 0; i < thread_count; ++i) all_returned &= threads[i].state == State::returned;
    if (all_returned) return true;
    if (!release_barrier()) return false;
  }
}

void place_shared_variables(Region* regions, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (!regions[i].shared) continue;
    regions[i].start += reinterpret_cast<uintptr_t>(&shared_anchor);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(reinterpret_cast<char*>(regions[i].start + regions[i].bytes), EMULATOR_SHARED_GAP);
#endif
  }
}

void poison(const Region* regions, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (regions[i].shared) std::memset(reinterpret_cast<void*>(regions[i].start), kPoison, regions[i].bytes);
  }
}

void run_grid(const Region* regions, size_t count) {
  for (unsigned z = 0; z < gridDim.z; ++z) {
    for (unsigned y = 0; y < gridDim.y; ++y) {
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = dim3(x, y, z);
        poison(regions, count);
        start_threads();
        checker::block_starts();
        if (!run_block()) return;
      }
    }
  }
}

}  // namespace

void barrier(Site site) { wait(State::at_barrier, site); }

uint64_t exchange(unsigned mask, uint64_t value, int source, Site site) {
  Thread& self = threads[running];
  self.mask = mask;
  self.value = value;
  self.source = source;
  if ((mask >> lane_index() & 1) == 0) {
    self.site = site;
    report(FaultKind::lane_outside, self, self, static_cast<int>(lane_index()));
    self.fiber.switch_to(host, true);
  }
  wait(State::at_warp, site);
  return self.result;
}

unsigned vote(unsigned mask, bool predicate, Site site) {
  return static_cast<unsigned>(exchange(mask, predicate, kVotes, site));
}

unsigned lane_index() { return running % kWarp; }

void refuse_shuffle(FaultKind kind, int given, Site site) {
  Thread& self = threads[running];
  self.site = site;
  report(kind, self, self, given);
  self.fiber.switch_to(host, true);
}

namespace scheduler {

unsigned current_thread() { return running; }

Actor current() { return {blockIdx, threads[running].index, {nullptr, 0, 0}, 0}; }

bool is_private(uintptr_t address, bool writes) {
  if (threads[running].fiber.has_on_stack(address)) return true;
  if (writes) return false;
  for (const dim3* index : {&threadIdx, &blockIdx, &blockDim, &gridDim}) {
    if (address - reinterpret_cast<uintptr_t>(index) < sizeof(dim3)) return true;
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(&__ehdr_start);
  return address - start < reinterpret_cast<uintptr_t>(&_GLOBAL_OFFSET_TABLE_) - start;
}

bool runs_thread(uintptr_t stack_pointer) { return stacks->contain(stack_pointer); }

bool is_past_stack(uintptr_t address) { return stacks->guard(address); }

void stop(const Fault& found) {
  fault = found;
  threads[running].fiber.switch_to(host, true);
}

dim3 thread_index(unsigned thread) { return threads[thread].index; }

dim3 block_index(uint32_t linear) {
  return dim3(linear % gridDim.x, linear / gridDim.x % gridDim.y, linear / (gridDim.x * gridDim.y));
}

}  // namespace scheduler
}  // namespace emulator

// Runs a kernel; null, or what it did wrong. `regions` is the memory that it may use, its arguments, its own variables
// in shared memory and at last its dynamic shared memory, whose address is filled in.
extern "C" __attribute__((visibility("default"))) const emulator::Fault* emulator_launch(
    const dim3* grid_and_block, const uint64_t* arguments, emulator::Region* regions, size_t count, uint64_t seed,
    emulator::Stacks* stacks, int interruptible) {
  using namespace emulator;
  gridDim = grid_and_block[0];
  blockDim = grid_and_block[1];
  thread_count = blockDim.x * blockDim.y * blockDim.z;
  emulator::arguments = arguments;
  emulator::stacks = stacks;
  random_state = seed;
  fault = Fault{};
  place_shared_variables(regions, count - 1);
  Region& dynamic = regions[count - 1];
  dynamic_shared = static_cast<char*>(std::malloc(dynamic.bytes + (dynamic.bytes == 0)));  // never null for nothing
  dynamic.start = reinterpret_cast<uintptr_t>(dynamic_shared);
  if (stacks->grow(thread_count) && dynamic_shared != nullptr && checker::launch_starts(regions, count)) {
    signals::launch_starts(interruptible != 0);
    run_grid(regions, count);
    signals::launch_ends();
    checker::launch_ends();
  } else {
    fault.kind = FaultKind::memory;
  }
  std::free(dynamic_shared);
  return fault.kind == FaultKind::none ? nullptr : &fault;
}
