"""One of our own backends: speed through the offline API, distributions from the runtime itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pocketllm.bench.contenders.base import Contender, Decoded, LogProbabilities, Setup, Tokens, log_softmax
from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.llm import LLM
from pocketllm.models.family import family
from pocketllm.runtimes.base import Batch, Runtime, RuntimeOptions
from pocketllm.runtimes.registry import select_backend
from pocketllm.types import SamplingParams

BLOCK_SIZE = 16
DTYPE = "float32"


class PocketLLM(Contender):
    """A backend by name. The model is loaded by the first call that needs it."""

    def __init__(self, setup: Setup, backend: str) -> None:
        super().__init__(setup)
        self._backend = backend
        self._device = "cpu" if setup.device == "auto" else setup.device

    @cached_property
    def _llm(self) -> LLM:
        return LLM(
            EngineArgs(
                model=str(self.setup.path),
                backend=self._backend,
                device=self._device,
                dtype=DTYPE,
                threads=self.setup.threads,
                max_model_len=self.setup.context,
                max_num_seqs=self.setup.sequences,
                block_size=BLOCK_SIZE,
            ),
            progress=False,
        )

    @cached_property
    def _runtime(self) -> Runtime:
        options = RuntimeOptions(device=self._device, dtype=DTYPE, block_size=BLOCK_SIZE, threads=self.setup.threads)
        with open_checkpoint(self.setup.path) as checkpoint:
            config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
            runtime = select_backend(self._backend, config, options).backend.load()(config, options)
            runtime.load(checkpoint, lambda *_: None)
        runtime.allocate(-(-self.setup.context // BLOCK_SIZE), 1)
        return runtime

    def facts(self) -> dict[str, str]:
        """See `Contender.facts`; of what is loaded already, where there is a choice."""
        subject = self._runtime if "_runtime" in vars(self) else self._llm.capabilities
        name = subject.name if isinstance(subject, Runtime) else subject.backend
        return {
            "backend": name,
            "device": self._device,
            "dtype": DTYPE,
            "batch invariant": subject.batch_invariant or "yes",
        }

    def prefill(self, prompt: Tokens) -> float:
        """See `Contender.prefill`."""
        start = time.perf_counter()
        self._llm.generate([list(prompt)], _greedy(1))
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Tokens], count: int) -> Decoded:
        """See `Contender.decode`. The clock runs where the caller of the API sees the tokens."""
        replies: list[list[int]] = [[] for _ in prompts]
        started, there = 0.0, 0
        for event in self._llm.generate_stream([list(prompt) for prompt in prompts], _greedy(count)):
            replies[event.prompt_index] += event.token_ids
            if not there and all(replies):
                started, there = time.perf_counter(), sum(map(len, replies))
        # A reply may lack the tokens of a character that is incomplete at its end; they were computed all the same.
        return Decoded(replies, len(prompts) * count - there, time.perf_counter() - started)

    def log_probabilities(self, tokens: Tokens) -> LogProbabilities:
        """See `Contender.log_probabilities`."""
        return log_softmax(_on_host(self._runtime.forward(_whole_prompt(tokens)).logits))

    def close(self) -> None:
        """See `Contender.close`."""
        if "_llm" in vars(self):
            self._llm.close()
        if "_runtime" in vars(self):
            self._runtime.close()


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def _whole_prompt(tokens: Tokens) -> Batch:
    """A step that reads a prompt from its first token and gives the logits of every row."""
    count = len(tokens)

    def int32(values: Any) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    return Batch(
        token_ids=int32(tokens),
        positions=int32(range(count)),
        query_start=int32([0, count]),
        context_len=int32([count]),
        block_table=int32([range(-(-count // BLOCK_SIZE))]),
        state_slot=int32([-1]),
        save_slot=int32([-1] * count),
        rope_length=int32([count]),
        output_rows=int32(range(count)),
    )


def _on_host(logits: Any) -> npt.NDArray[np.float32]:
    """A runtime's logits as they are. `Runtime.score` could give them too, but only sorted."""
    if hasattr(logits, "cpu"):  # a torch tensor, wherever it lies
        logits = logits.float().cpu().numpy()
    return np.asarray(logits, dtype=np.float32)
