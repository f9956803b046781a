"""The life cycle of compiled kernels: key, look up, build under a lock, load; the same for every toolchain."""
