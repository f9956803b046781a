// Memory for the stacks of a block's threads. All libraries of a process take turns with it.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace emulator {

constexpr size_t kStackBytes = 256 << 10;  // twice the frames that the compiler lets pass; untouched pages cost nothing
constexpr size_t kGuardBytes = 256 << 10;  // before each stack; no frame reaches over it
constexpr size_t kStride = kGuardBytes + kStackBytes;

// Python keeps it from launch to launch: see library.py.
struct Stacks {
  char* memory;
  uint64_t count;

  size_t bytes() const { return count * kStride + kGuardBytes; }
  char* stack(unsigned thread) const { return memory + thread * kStride + kGuardBytes; }
  bool contain(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(memory) < bytes(); }
  bool guard(uintptr_t address) const {
    return contain(address) && (address - reinterpret_cast<uintptr_t>(memory)) % kStride < kGuardBytes;
  }

  // Makes them at least `wanted`; false where there is no memory.
  bool grow(unsigned wanted) {
    if (wanted <= count) return true;
    if (count != 0) munmap(memory, bytes());
    count = wanted;
    void* mapped = mmap(nullptr, bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
      count = 0;
      return false;
    }
    memory = static_cast<char*>(mapped);
    bool usable = true;
    for (unsigned i = 0; i < count; ++i) usable &= mprotect(stack(i), kStackBytes, PROT_READ | PROT_WRITE) == 0;
    if (usable) return true;
    munmap(memory, bytes());
    count = 0;
    return false;
  }
};

}  // namespace emulator
