"""Results as HTML, for notebooks: texts, and tokens shaded by how likely the model found them."""

from __future__ import annotations

import codecs
import html
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pocketllm.types import CompletionOutput, RequestOutput, ScoreOutput, TokenLogprob

_TEXT_STYLE = "white-space: pre-wrap; margin: 0.2em 0; text-align: left"
_FACTS_STYLE = "opacity: 0.7; font-size: 85%; text-align: left"
_SHADE = "230, 90, 0"
_DARKEST = 0.7  # opacity of the shade of a token of probability 0: the text stays readable on light and dark pages


def reply_html(output: RequestOutput) -> str:
    """Every choice with its facts; tokens are shaded where log probabilities were asked for."""
    return "".join(_choice_html(choice, of=len(output.outputs)) for choice in output.outputs)


def score_html(score: ScoreOutput) -> str:
    """The prompt, its tokens shaded by their probability."""
    scored = sum(entry is not None for entry in score.logprobs)
    facts = f"{scored} tokens scored, log probability {score.total_logprob:.3f}, perplexity {score.perplexity:.3f}"
    return _block(_shaded(zip(score.tokens, score.logprobs, strict=True)), facts)


def _choice_html(choice: CompletionOutput, *, of: int) -> str:
    facts = f"{choice.completion_tokens} tokens, {choice.finish_reason}"
    if of > 1:
        facts = f"choice {choice.index}: {facts}"
    if choice.stop_match is not None:
        facts += f" at {choice.stop_match!r}"
    if choice.logprobs is None:
        return _block(html.escape(choice.text), facts)
    return _block(_shaded((entry.token, entry) for entry in choice.logprobs), facts)


def _block(content: str, facts: str) -> str:
    return (
        f'<div><pre style="{_TEXT_STYLE}">{content}</pre><div style="{_FACTS_STYLE}">{html.escape(facts)}</div></div>'
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Whole characters, and the tokens that they come from; `logprob` is None where one of them has none."""

    text: str
    logprob: float | None
    entries: tuple[TokenLogprob, ...]


def _pieces(tokens: Iterable[tuple[bytes, TokenLogprob | None]]) -> Iterator[_Piece]:
    """Tokens that share a character are one piece: apart, they are no text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = ""
    entries: list[TokenLogprob | None] = []

    def piece() -> _Piece:
        known = tuple(entry for entry in entries if entry is not None)
        logprob = math.fsum(entry.logprob for entry in known) if len(known) == len(entries) else None
        return _Piece(text, logprob, known)

    for raw, entry in tokens:
        text += decoder.decode(raw)
        entries.append(entry)
        if not decoder.getstate()[0]:
            yield piece()
            text, entries = "", []
    text += decoder.decode(b"", final=True)
    if entries:
        yield piece()


def _shaded(tokens: Iterable[tuple[bytes, TokenLogprob | None]]) -> str:
    return "".join(map(_span, _pieces(tokens)))


def _span(piece: _Piece) -> str:
    text = html.escape(piece.text)
    if piece.logprob is None:
        return f"<span>{text}</span>"
    opacity = _DARKEST * (1 - math.exp(piece.logprob))
    title = html.escape("\n".join(map(_entry_title, piece.entries)))
    return f'<span style="background: rgba({_SHADE}, {opacity:.2f})" title="{title}">{text}</span>'


def _entry_title(entry: TokenLogprob) -> str:
    """A token's probability, and those of the likeliest at its place."""
    lines = [_probability(entry)]
    lines += ["likeliest:", *map(_probability, entry.top)] if entry.top else []
    return "\n".join(lines)


def _probability(entry: TokenLogprob) -> str:
    return f"{entry.token.decode('utf-8', 'replace')!r} {math.exp(entry.logprob):.4f}"
