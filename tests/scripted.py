"""Engines over a scripted runtime: text pieces become tokens of a small vocabulary, and a script plays them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pocketllm.checkpoint.template import ChatTemplate
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.engine import Engine
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.engine.sampler import SamplingDefaults
from pocketllm.engine.scheduler import Scheduler
from pocketllm.models.rotary import Rotary
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.null_runtime import NullRuntime, Script
from pocketllm.types import Capabilities

END = "<|end|>"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@dataclass(frozen=True)
class ScriptedConfig:
    """The least that an engine asks of a model's configuration."""

    vocab_size: int
    model_type: str = "scripted"
    hidden_size: int = 8
    context_length: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    rotaries: tuple[Rotary, ...] = ()


def _printable_bytes() -> dict[int, str]:
    """GPT-2's spelling of bytes as characters."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}


class Vocabulary:
    """A byte-level vocabulary: every byte, the end token, and whatever pieces a test adds.

    Texts are encoded byte by byte; the pieces are only ever produced by scripts.
    """

    def __init__(self, pieces: Sequence[str | bytes] = ()) -> None:
        spelling = _printable_bytes()
        encoded = (piece.encode() if isinstance(piece, str) else piece for piece in pieces)
        raw = [piece for piece in dict.fromkeys(encoded) if len(piece) > 1]
        spelled = ["".join(spelling[byte] for byte in piece) for piece in raw]
        tokens = [spelling[byte] for byte in range(256)] + [END, "<|pad|>"]
        self._ids = dict(zip(raw, range(len(tokens), len(tokens) + len(raw)), strict=True))
        tokens += spelled
        self.end = 256
        self.size = len(tokens)
        self.tokenizer = Tokenizer.from_gguf(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * len(raw),
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.eos_token_id": self.end,
                "tokenizer.ggml.add_bos_token": False,
            }
        )

    def id(self, piece: str | bytes) -> int:
        """The token of a piece, or of a single byte."""
        raw = piece.encode() if isinstance(piece, str) else piece
        return self._ids[raw] if raw in self._ids else raw[0]

    def ids(self, *pieces: str | bytes) -> list[int]:
        """The tokens of pieces."""
        return [self.id(piece) for piece in pieces]


def reply_with(token_ids: Sequence[int], *, prompt_length: int | None = None, end: int = 256) -> Script:
    """A script that answers a prompt of `prompt_length` tokens (or any first prompt) with these tokens, then ends."""
    start: dict[str, int] = {} if prompt_length is None else {"length": prompt_length}

    def script(context: tuple[int, ...]) -> int:
        place = len(context) - start.setdefault("length", len(context))
        return token_ids[place] if place < len(token_ids) else end

    return script


def arithmetic(vocabulary: Vocabulary) -> Script:
    """A script whose next token depends on every token before it: a wrong context shows at once."""

    def script(context: tuple[int, ...]) -> int:
        assert min(context) >= 0, f"an entry was read that nobody wrote: {context}"
        value = 7
        for token in context:
            value = (value * 31 + token + 1) % 65521
        return 97 + value % 26

    return script


def scripted_engine(
    script: Script | Callable[[tuple[int, ...]], int],
    vocabulary: Vocabulary | None = None,
    *,
    blocks: int = 512,
    block_size: int = 4,
    max_model_len: int = 1024,
    max_sequences: int = 8,
    prefill_chunk: int = 32,
    max_queue: int = 64,
    decode_share: float = 0.25,
    step_timeout: float = 300.0,
    prefix_cache: bool = True,
    states: int = 0,
) -> Engine:
    """A serving engine whose replies `script` decides; one with `states` has a model with recurrent states."""
    vocabulary = vocabulary or Vocabulary()
    config = ScriptedConfig(vocab_size=vocabulary.size)
    options = RuntimeOptions(device="cpu", dtype="float32", block_size=block_size)
    runtime = NullRuntime.scripted(script, config, options, recurrent=states > 0)
    runtime.allocate(blocks, states)
    keys = PrefixKeys(runtime.numerics_id) if prefix_cache else None
    return Engine(
        runtime,
        config=config,
        tokenizer=vocabulary.tokenizer,
        template=ChatTemplate(TEMPLATE),
        capabilities=Capabilities(
            backend="null",
            backend_reason="a test",
            device="cpu",
            dtype="float32",
            model_type="scripted",
            max_sequences=max_sequences,
            max_model_len=max_model_len,
            chunked_prefill=True,
            paged_kv=True,
            prefix_cache=prefix_cache,
            batch_invariant=None,
        ),
        scheduler=Scheduler(
            CacheManager(blocks, block_size, states=states, keys=keys),
            max_sequences=max_sequences,
            prefill_chunk=prefill_chunk,
            decode_share=decode_share,
        ),
        end_ids=frozenset({vocabulary.end}),
        defaults=SamplingDefaults(temperature=0.0),
        model_id="scripted",
        max_queue=max_queue,
        step_timeout=step_timeout,
    )
