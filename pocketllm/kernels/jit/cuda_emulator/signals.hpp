// What ends a process elsewhere ends only the launch here, and is told as a fault of the kernel's.
#pragma once

namespace emulator::signals {

// `interruptible`: an interrupt from the keyboard ends the launch too.
void launch_starts(bool interruptible);
void launch_ends();  // hands on an interrupt
bool interrupted();

}  // namespace emulator::signals
