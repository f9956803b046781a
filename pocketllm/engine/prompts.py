"""From what a caller gives to the token ids that are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.checkpoint.template import ChatTemplate
from pocketllm.checkpoint.tokenizer import Tokenizer
from pocketllm.errors import InvalidRequestError
from pocketllm.types import Message

# For checkpoints that bring no template: roles and contents in plain words.
FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def raw_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[int], *, vocab_size: int, add_special_tokens: bool
) -> list[int]:
    """A text's ids, with special tokens parsed; or the ids themselves, checked against the model's vocabulary."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, parse_special=True)
    for place, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"prompt token {place} is {token_id!r}: ids are whole numbers from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return list(prompt)


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> list[int]:
    """A conversation's ids. Message contents never turn into special tokens."""
    rendered = template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
    return tokenizer.encode_chat(rendered)
