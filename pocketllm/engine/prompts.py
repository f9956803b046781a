"""From what a caller gives to the token ids that are run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.checkpoint.special_tokens import RenderedPrompt, SpecialTokens, replace_surrogates
from pocketllm.checkpoint.template import ChatTemplate, normalise_messages
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
    return _checked_ids(prompt, vocab_size)


def _checked_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    for place, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"prompt token {place} is {token_id!r}: ids are whole numbers from 0 to {vocab_size - 1}",
                param="prompt",
            )
    return list(prompt)


def infill_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[int], suffix: str, *, vocab_size: int, add_special_tokens: bool
) -> list[int]:
    """The ids that ask for what belongs between `prompt` and `suffix`.

    Special tokens are not parsed: source code may well contain their texts.

    Raises:
        InvalidRequestError: the tokenizer has no fill-in-the-middle tokens, or an id is outside the vocabulary.
    """
    fim = tokenizer.fill_in_middle
    if fim is None:
        raise InvalidRequestError(
            "This model's tokenizer has no fill-in-the-middle tokens, so it cannot write up to a given suffix: leave "
            "the suffix out, or serve a code model.",
            param="suffix",
        )
    if isinstance(prompt, str):
        before = tokenizer.encode(prompt, add_special_tokens=False, parse_special=False)
    else:
        before = _checked_ids(prompt, vocab_size)
    after = tokenizer.encode(suffix, add_special_tokens=False, parse_special=False)
    bos = tokenizer.bos_token_id
    begin = [bos] if add_special_tokens and tokenizer.add_bos_token and bos is not None else []
    return [*begin, fim.prefix, *before, fim.suffix, *after, fim.middle]


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    special_tokens: SpecialTokens,
) -> RenderedPrompt:
    """A conversation as the model's template writes it.

    With `continue_final_message` the last message is left to be gone on with: its text follows the opening of an
    assistant turn.
    """
    if not continue_final_message:
        return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
    prompt = template.render(messages[:-1], add_generation_prompt=True, variables=variables)
    start = replace_surrogates(normalise_messages(messages[-1:])[0]["content"])
    breaks = (len(prompt.text) + place for place in special_tokens.breaks_in(start))
    return RenderedPrompt(prompt.text + start, (*prompt.breaks, *breaks))
