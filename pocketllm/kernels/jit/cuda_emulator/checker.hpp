// What the scheduler tells the checker, and asks of nobody in a build without one.
#pragma once
#include "runtime.hpp"

namespace emulator::checker {

#ifdef EMULATOR_CHECKED

bool launch_starts(const Region* regions, size_t count);  // false: no memory
void launch_ends();
void block_starts();
void barrier_passed();
void warp_met(unsigned first_thread, unsigned mask);

#else

inline bool launch_starts(const Region*, size_t) { return true; }
inline void launch_ends() {}
inline void block_starts() {}
inline void barrier_passed() {}
inline void warp_met(unsigned, unsigned) {}

#endif

}  // namespace emulator::checker
