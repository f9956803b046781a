"""Whether an implementation does what its op's contract says."""
