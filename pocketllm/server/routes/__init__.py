"""Endpoints, one module a dialect."""
