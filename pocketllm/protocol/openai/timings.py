"""How long a reply took, in llama-server's terms, and the proof of what it is made of."""

from __future__ import annotations

from typing import Any

from pocketllm.protocol.openai.answer import Answer

MILLISECONDS = 1000.0


def timings(answer: Answer) -> dict[str, Any]:
    """llama-server's ``timings``.

    ``cache_n + prompt_n`` are the prompt tokens of ``usage`` and ``predicted_n`` its completion tokens. A choice of n
    tokens takes n - 1 decode steps, since its first token comes from the prompt's last logits. Where there are several
    prompts or choices, times and steps are summed over them, so that the rates are what a single reader sees; a prompt
    that several choices share counts once, with the time of the quickest.
    """
    usage = answer.usage
    prefill = sum(min(times) for times in answer.prefill_seconds) * MILLISECONDS
    decode = sum(choice.timing.decode for _, choice in answer.choices if choice.timing) * MILLISECONDS
    steps = sum(max(choice.completion_tokens - 1, 0) for _, choice in answer.choices)
    computed = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_rates("prompt", computed, prefill, computed),
        **_rates("predicted", usage.completion_tokens, decode, steps),
    }


def _rates(name: str, tokens: int, milliseconds: float, steps: int) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": milliseconds / steps if steps else 0.0,
        f"{name}_per_second": MILLISECONDS * steps / milliseconds if milliseconds else 0.0,
    }


def proof(answer: Answer) -> dict[str, Any]:
    """The ``pocketllm`` block: what shows that two replies are the same, and what drafting has saved."""
    first_tokens = [
        choice.timing.waiting + choice.timing.prefill
        for _, choice in answer.choices
        if choice.timing and choice.completion_tokens
    ]
    return {
        "token_sha": [choice.token_sha for _, choice in answer.choices],
        "seed": answer.seed,
        "time_to_first_token_ms": min(first_tokens) * MILLISECONDS if first_tokens else None,
        "drafted": 0,
        "accepted": 0,
    }
