"""Wire dialects to and from the engine's types; no I/O, no web framework, no tensor library."""
