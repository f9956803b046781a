// What the scheduler tells the checker and the handlers of signals of the thread that runs.
#pragma once
#include "runtime.hpp"

namespace emulator::scheduler {

unsigned current_thread();
Actor current();  // the same, without a site
dim3 thread_index(unsigned thread);
dim3 block_index(uint32_t linear);
bool is_private(uintptr_t address, bool writes);  // on the thread's own stack, or a constant that it reads
bool runs_thread(uintptr_t stack_pointer);        // rather than the scheduler itself
bool is_past_stack(uintptr_t address);            // between two threads' stacks
void stop(const Fault& found);                    // ends the launch; does not return

}  // namespace emulator::scheduler
