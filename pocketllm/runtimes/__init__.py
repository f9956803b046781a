"""Backends: what loads a model, runs batches and keeps caches."""
