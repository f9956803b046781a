"""Looking at what an engine's steps are made of."""

from __future__ import annotations

from pocketllm.engine.engine import Engine
from pocketllm.runtimes.base import Batch, StepOutput


def step_sizes(engine: Engine) -> list[int]:
    """How many sequences each step from now on has; the list grows."""
    sizes: list[int] = []
    runtime = engine._runtime
    forward = runtime.forward

    def recorded(batch: Batch) -> StepOutput:
        sizes.append(len(batch.context_len))
        return forward(batch)

    runtime.forward = recorded  # type: ignore[method-assign]
    return sizes
