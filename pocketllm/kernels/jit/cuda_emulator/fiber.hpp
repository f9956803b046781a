// A thread of control with a stack of its own, which runs until it hands over to another one.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __SANITIZE_ADDRESS__
extern "C" void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size);
extern "C" void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
#endif

#ifdef __x86_64__

extern "C" void emulator_switch(void** save_stack_pointer, void* load_stack_pointer);

// The registers that a function has to preserve go to the old stack and come from the new one.
__asm__(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, .-emulator_switch
)");

class Registers {
 public:
  // The next switch to these registers calls `entry`, which must not return.
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15});
    *--top = nullptr;  // where a return address would lie: a function expects the stack to be off by 8
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer_ = top;
  }
  void switch_to(Registers& next) { emulator_switch(&stack_pointer_, next.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
};

#else  // slower, for each switch asks the system for the signal mask

#include <ucontext.h>

class Registers {
 public:
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void switch_to(Registers& next) { swapcontext(&context_, &next.context_); }

 private:
  ucontext_t context_;
};

#endif

class Fiber {
 public:
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    stack_ = stack;
    bytes_ = bytes;
    registers_.prepare(stack, bytes, entry);
  }

  // Stops this one and goes on with `next`; returns when something switches back. `last`: nothing ever will.
  void switch_to(Fiber& next, bool last = false) {
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, next.stack_, next.bytes_);
#endif
    (void)last;
    registers_.switch_to(next.registers_);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // To be called first by an entry function; `from` is the fiber that switched to it.
  static void entered(Fiber& from) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &from.stack_, &from.bytes_);
#endif
    (void)from;
  }

  bool has_on_stack(uintptr_t address) const { return address - reinterpret_cast<uintptr_t>(stack_) < bytes_; }

 private:
  Registers registers_;
  const void* stack_ = nullptr;
  size_t bytes_ = 0;
};
