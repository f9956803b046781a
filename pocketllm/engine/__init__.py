"""The engine: from submitted requests to batches, tokens and events."""
