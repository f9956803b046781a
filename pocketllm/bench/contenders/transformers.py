"""Hugging Face's transformers in float32; a GGUF's weights are dequantised while it is loaded."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from pocketllm.bench.contenders.base import Contender, Decoded, LogProbabilities, Setup, Tokens, log_softmax


class Transformers(Contender):
    """The same weights, eager execution, its own growing key and value cache."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        torch.set_num_threads(setup.threads)
        transformers.utils.logging.set_verbosity_error()
        file = {"gguf_file": setup.path.name} if setup.path.is_file() else {}
        folder = setup.path.parent if setup.path.is_file() else setup.path
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32, local_files_only=True, **file).eval()
        # The newer name came with transformers 5.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def facts(self) -> dict[str, str]:
        """See `Contender.facts`."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "attention": str(self._model.config._attn_implementation),
            "dtype": "float32",
        }

    def prefill(self, prompt: Tokens) -> float:
        """See `Contender.prefill`."""
        start = time.perf_counter()
        self._step(torch.tensor([list(prompt)]), transformers.DynamicCache())
        return time.perf_counter() - start

    def decode(self, prompts: Sequence[Tokens], count: int) -> Decoded:
        """See `Contender.decode`; the prompts have the same length."""
        cache = transformers.DynamicCache()
        steps = [self._step(torch.tensor([list(prompt) for prompt in prompts]), cache)]
        start = time.perf_counter()
        for _ in range(count - 1):
            steps.append(self._step(steps[-1], cache))
        seconds = time.perf_counter() - start
        return Decoded(torch.cat(steps, dim=1).tolist(), len(prompts) * (count - 1), seconds)

    def close(self) -> None:
        """See `Contender.close`."""
        del self._model

    @torch.inference_mode()
    def log_probabilities(self, tokens: Tokens) -> LogProbabilities:
        """See `Contender.log_probabilities`."""
        logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return log_softmax(logits.numpy())

    @torch.inference_mode()
    def _step(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The likeliest next token of each row, [B, 1]; the cache grows by this step."""
        output = self._model(token_ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        likeliest: torch.Tensor = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        return likeliest
