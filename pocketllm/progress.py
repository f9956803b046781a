"""Progress bars, where somebody can see them."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

from pocketllm.types import TokenEvent


def shows(progress: bool | None) -> bool:
    """Whether to draw a bar: as asked, else on a terminal and in a notebook."""
    if progress is not None:
        return progress
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


class _Bar:
    """A bar that is closed when its block is left; without one, updates go nowhere."""

    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


class LoadingBar(_Bar):
    """How far a model is loaded."""

    def __init__(self, progress: bool | None) -> None:
        super().__init__()
        self._shown = shows(progress)

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` of what is being done; the first call draws the bar."""
        if not self._shown:
            return
        if self._bar is None:
            self._bar = tqdm(total=total, leave=False)
        if self._bar.desc != f"{what}: ":
            self._bar.reset(total)
            self._bar.set_description(what)
        self._bar.update(done - self._bar.n)


class PromptsBar(_Bar):
    """How many prompts are finished, and tokens a second over all of them; for a single prompt there is no bar."""

    def __init__(self, prompts: int, progress: bool | None) -> None:
        super().__init__()
        if prompts > 1 and shows(progress):
            self._bar = tqdm(total=prompts, unit="prompt")
        self._started = time.perf_counter()
        self._tokens = 0

    def add(self, event: TokenEvent, finished: int) -> None:
        """Count an event; `finished` prompts are done so far."""
        if self._bar is None:
            return
        self._tokens += len(event.token_ids)
        if finished > self._bar.n:
            rate = self._tokens / (time.perf_counter() - self._started)
            self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(finished - self._bar.n)
