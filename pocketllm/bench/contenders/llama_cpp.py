"""llama.cpp through llama-cpp-python's bindings to its C interface, without its Python layers in the loop.

What llama.cpp measures with its own tools is the same: one ``llama_decode`` a step, the next tokens from the logits.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pocketllm.bench.contenders.base import Contender, Decoded, LogProbabilities, Setup, Tokens, log_softmax
from pocketllm.errors import CheckpointError, EngineError

BATCH = 512
"""Tokens of one ``llama_decode`` and of one compute graph: llama.cpp's own default for the latter."""


_SILENT = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
"""Kept here, because llama.cpp calls it as long as the process lives."""


class LlamaCpp(Contender):
    """The same GGUF on the same number of threads."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(setup.path).encode(), options)
        if not self._model:
            raise CheckpointError(f"{setup.path}: llama.cpp cannot load it")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    @cached_property
    def _context(self) -> Any:
        return self._open(sequences=self.setup.sequences, every_row=False)

    @cached_property
    def _scoring_context(self) -> Any:
        return self._open(sequences=1, every_row=True)

    def _open(self, *, sequences: int, every_row: bool) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = self.setup.context * sequences
        options.n_batch = options.n_ubatch = BATCH
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = self.setup.threads
        if every_row and hasattr(options, "n_outputs_max_per_seq"):
            options.n_outputs_max_per_seq = 0  # as many as the batch has; older versions set no limit
        context = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise EngineError("llama.cpp cannot make a context: there may be too little memory")
        return context

    def facts(self) -> dict[str, str]:
        """See `Contender.facts`."""
        return {
            "llama-cpp-python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode().strip(),
            "KV cache": "float16",
        }

    def prefill(self, prompt: Tokens) -> float:
        """See `Contender.prefill`."""
        self._forget(self._context)
        start = time.perf_counter()
        self._next_tokens([list(prompt)], past=0)
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Tokens], count: int) -> Decoded:
        """See `Contender.decode`; the prompts have the same length."""
        self._forget(self._context)
        tokens = self._next_tokens([list(prompt) for prompt in prompts], past=0)
        replies = [[token] for token in tokens]
        start = time.perf_counter()
        for past in range(len(prompts[0]), len(prompts[0]) + count - 1):
            tokens = self._next_tokens([[token] for token in tokens], past)
            for reply, token in zip(replies, tokens, strict=True):
                reply.append(token)
        return Decoded(replies, len(prompts) * (count - 1), time.perf_counter() - start)

    def log_probabilities(self, tokens: Tokens) -> LogProbabilities:
        """See `Contender.log_probabilities`."""
        self._forget(self._scoring_context)
        pieces = [tokens[start : start + BATCH] for start in range(0, len(tokens), BATCH)]
        rows = [
            self._run(self._scoring_context, [piece], index * BATCH, every_row=True)
            for index, piece in enumerate(pieces)
        ]
        return log_softmax(np.concatenate(rows))

    def _next_tokens(self, pieces: Sequence[Tokens], past: int) -> list[int]:
        logits = self._run(self._context, pieces, past, every_row=False)
        return [int(token) for token in logits.argmax(axis=1)]

    def _run(self, context: Any, pieces: Sequence[Tokens], past: int, *, every_row: bool) -> npt.NDArray[np.float32]:
        """One step over a piece of each sequence, `past` tokens after its start; a copy of the logits."""
        total = sum(map(len, pieces))
        batch = llama_cpp.llama_batch_init(total, 0, 1)
        try:
            row = wanted = 0
            for sequence, piece in enumerate(pieces):
                for place, token in enumerate(piece):
                    batch.token[row], batch.pos[row] = token, past + place
                    batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                    batch.logits[row] = every_row or place == len(piece) - 1
                    wanted += batch.logits[row]
                    row += 1
            batch.n_tokens = total
            status = llama_cpp.llama_decode(context, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        if status:
            raise EngineError(f"llama_decode gave status {status}")
        logits = llama_cpp.llama_get_logits(context)  # waits for the computation
        return np.ctypeslib.as_array(logits, shape=(wanted, self._vocab_size)).copy()

    def _forget(self, context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)

    def close(self) -> None:
        """See `Contender.close`."""
        for name in ("_context", "_scoring_context"):
            if name in vars(self):
                llama_cpp.llama_free(vars(self)[name])
        llama_cpp.llama_model_free(self._model)
