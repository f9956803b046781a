// Handlers of signals for as long as a kernel runs: they note down the fault and go back to the scheduler. Signals that
// are none of the kernel's doing go to whoever handled them before.
//
// An interrupt comes at any moment, and what a function outside of this library was doing must not be left half done
// (it may hold the lock of the heap). There, as in the scheduler, the interrupt is only noted down; a kernel that
// reaches no meeting point any more ends with the next one.
#include "signals.hpp"

#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

#include <cstddef>

#include "scheduler.hpp"

extern "C" const char __ehdr_start;  // where this library lies in memory, by the linker
extern "C" __attribute__((visibility("hidden"))) const char etext;  // and where its code ends

namespace emulator::signals {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT};
constexpr size_t kCrashes = 5;  // of them; the last is the interrupt

struct sigaction before[kCrashes + 1];
size_t handled;
stack_t stack_before;
alignas(64) char stack[64 << 10];  // a thread whose own stack is used up has none left for a handler
pthread_t launcher;
volatile sig_atomic_t is_interrupted;

struct Machine {
  uintptr_t instruction, stack_pointer;
};

Machine machine(const void* context) {
  const mcontext_t& registers = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return {static_cast<uintptr_t>(registers.gregs[REG_RIP]), static_cast<uintptr_t>(registers.gregs[REG_RSP])};
#elif defined(__aarch64__)
  return {static_cast<uintptr_t>(registers.pc), static_cast<uintptr_t>(registers.sp)};
#else
  (void)registers;
  return {0, 0};  // on no thread's stack: such a crash ends the process
#endif
}

uintptr_t within_library(uintptr_t instruction) {
  const uintptr_t start = reinterpret_cast<uintptr_t>(&__ehdr_start);
  return instruction - start < reinterpret_cast<uintptr_t>(&etext) - start ? instruction - start : 0;
}

void hand_on(int signal, siginfo_t* info, void* context) {
  for (size_t i = 0; i < handled; ++i) {
    if (kSignals[i] != signal) continue;
    if (before[i].sa_flags & SA_SIGINFO) {
      before[i].sa_sigaction(signal, info, context);
    } else if (before[i].sa_handler == SIG_DFL) {
      sigaction(signal, &before[i], nullptr);
      raise(signal);
    } else if (before[i].sa_handler != SIG_IGN) {
      before[i].sa_handler(signal);
    }
  }
}

void handle(int signal, siginfo_t* info, void* context) {
  const Machine at = machine(context);
  const bool is_launcher = pthread_equal(pthread_self(), launcher) != 0;
  const bool is_kernel = is_launcher && scheduler::runs_thread(at.stack_pointer);
  Fault fault{};
  fault.kind = FaultKind::crash;
  if (signal == SIGINT && is_launcher) {
    is_interrupted = 1;
    if (!is_kernel || within_library(at.instruction) == 0) return;
    fault.kind = FaultKind::interrupt;
  } else if (!is_kernel) {
    hand_on(signal, info, context);
    return;
  }
  fault.signal = signal;
  fault.address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (signal == SIGSEGV && scheduler::is_past_stack(fault.address)) fault.kind = FaultKind::stack;
  fault.first = scheduler::current();
  fault.first.site.instruction = within_library(at.instruction);
  scheduler::stop(fault);
}

}  // namespace

#ifdef __SANITIZE_ADDRESS__  // whose own handlers tell more

void launch_starts(bool) {}
void launch_ends() {}
bool interrupted() { return false; }

#else

void launch_starts(bool interruptible) {
  launcher = pthread_self();
  is_interrupted = 0;
  handled = interruptible ? kCrashes + 1 : kCrashes;
  stack_t own{};
  own.ss_sp = stack;
  own.ss_size = sizeof stack;
  sigaltstack(&own, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;  // NODEFER: a handler may never return
  for (size_t i = 0; i < handled; ++i) sigaction(kSignals[i], &action, &before[i]);
}

void launch_ends() {
  for (size_t i = 0; i < handled; ++i) sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  if (is_interrupted) raise(SIGINT);
}

bool interrupted() { return is_interrupted != 0; }

#endif

}  // namespace emulator::signals
