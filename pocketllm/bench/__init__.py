"""Benchmarks: measured with the machine, the versions and the commit beside the figures."""
