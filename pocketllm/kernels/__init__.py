"""Ops: contracts, implementations and their discovery."""
