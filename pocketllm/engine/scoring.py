"""Log probabilities of tokens, from what a runtime scores."""

from __future__ import annotations

from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.runtimes.base import Scores
from pocketllm.types import TokenLogprob


def token_logprob(tokenizer: Tokenizer, scores: Scores, row: int, token_id: int, top: int) -> TokenLogprob:
    """The entry of `token_id`, which `scores` has as the target of `row`, with the `top` likeliest beside it."""
    total = float(scores.logsumexp[row])
    likeliest = (
        TokenLogprob(int(i), tokenizer.token_bytes(int(i)), _below_zero(float(logit) - total))
        for i, logit in zip(scores.top_ids[row, :top], scores.top_logits[row, :top], strict=True)
        if i >= 0
    )
    own = _below_zero(float(scores.target_logit[row]) - total)
    return TokenLogprob(token_id, tokenizer.token_bytes(token_id), own, tuple(likeliest))


def _below_zero(logprob: float) -> float:
    """Rounding can put the logarithm of a probability of one a little above zero."""
    return min(logprob, 0.0)
