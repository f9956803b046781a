"""Texts and conversations to token ids and back: llama-server's dialect and vLLM's, told apart by their fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.fields import Default, NotServed, RequestObject
from pocketllm.protocol.openai.conversation import ConversationFields
from pocketllm.protocol.openai.logprobs import token_name
from pocketllm.protocol.openai.sampling import TokenId
from pocketllm.protocol.validation import validated


class _Addressed(RequestObject):
    model: Annotated[str | None, Field(description="Inert: one model is served.")] = None


class TokenizeContent(_Addressed):
    """``POST /tokenize`` in llama-server's dialect."""

    content: Annotated[str, Field(description="The text.")]
    add_special: Annotated[
        bool | None,
        Field(description="Add the tokens that the tokenizer's metadata puts around a text."),
        Default("false"),
    ] = None
    parse_special: Annotated[
        bool | None, Field(description="Whether the text of a special token is that token."), Default("true")
    ] = None
    with_pieces: Annotated[
        bool | None,
        Field(description="Give each token's text beside its id; a list of bytes where it is no text by itself."),
        Default("false"),
    ] = None


class _NamesTokens(_Addressed):
    return_token_strs: Annotated[
        bool | None, Field(description="Give each token's text in token_strs."), Default("false")
    ] = None


class TokenizePrompt(_NamesTokens):
    """``POST /tokenize`` of a text in vLLM's dialect."""

    prompt: Annotated[str, Field(description="The text; special tokens are parsed.")]
    add_special_tokens: Annotated[
        bool | None,
        Field(description="Add the tokens that the tokenizer's metadata puts around a text."),
        Default("true"),
    ] = None


class TokenizeMessages(ConversationFields, _NamesTokens):
    """``POST /tokenize`` of a conversation in vLLM's dialect."""

    add_special_tokens: Annotated[Any, NotServed("a template writes them itself", False)] = None


class DetokenizeRequest(_Addressed):
    """``POST /detokenize`` in both dialects."""

    tokens: Annotated[
        list[TokenId], Field(fail_fast=True, description="Token ids; control tokens give their text too.")
    ]


TOKENIZE_TABLES: dict[str, type[TokenizeContent | TokenizePrompt | TokenizeMessages]] = {
    "content": TokenizeContent,
    "prompt": TokenizePrompt,
    "messages": TokenizeMessages,
}


def tokenize_fields(body: dict[str, Any]) -> TokenizeContent | TokenizePrompt | TokenizeMessages:
    """The fields of ``POST /tokenize``; InvalidRequestError unless exactly one of the three inputs is there."""
    given = [name for name in TOKENIZE_TABLES if body.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(f'"{name}"' for name in given) or "none of them"
        raise InvalidRequestError(
            'Give exactly one of "content" (llama-server\'s dialect), "prompt" and "messages" (vLLM\'s): '
            f"there is {found}.",
            param=given[1] if given else None,
        )
    absent = TOKENIZE_TABLES.keys() - given
    return validated(TOKENIZE_TABLES[given[0]], {name: value for name, value in body.items() if name not in absent})


def pieces_body(tokens: list[tuple[int, bytes]]) -> dict[str, Any]:
    """llama-server's answer with the tokens' texts."""
    return {"tokens": [{"id": token_id, "piece": _piece(token)} for token_id, token in tokens]}


def _piece(token: bytes) -> str | list[int]:
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return list(token)


def counted_body(token_ids: list[int], window: int, tokens: list[bytes] | None) -> dict[str, Any]:
    """vLLM's answer; `tokens` are the bytes of each where their texts were asked for."""
    return {
        "count": len(token_ids),
        "max_model_len": window,
        "tokens": token_ids,
        "token_strs": None if tokens is None else [token_name(token) for token in tokens],
    }
