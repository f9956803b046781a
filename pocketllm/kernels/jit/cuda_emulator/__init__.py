"""CUDA C kernels on a machine without a GPU, compiled by g++ and run with a fiber for each thread of a block.

Two builds look for faults beside running the kernel, and every build tells of threads that miss a barrier or a warp
operation. ``checked`` finds accesses out of bounds and races. ``address`` is compiled for AddressSanitizer, whose
library has to be in the process from its start.
"""
