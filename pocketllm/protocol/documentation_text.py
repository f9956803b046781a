"""The prose of ``docs/api.md``."""

from __future__ import annotations

INTRODUCTION = """\
# HTTP API

<!-- Made by `python -m pocketllm.protocol.documentation > docs/api.md`; edit the sources instead. -->

`pocketllm serve` speaks OpenAI's chat and plain completions, and the tokenizer routes of llama-server and vLLM. It
listens before the model is loaded; until then every route that needs the model answers 503 with `Retry-After`."""

ROUTES = {
    "POST /v1/chat/completions": "Answers a conversation, whole or streamed.",
    "POST /v1/chat/completions/input_tokens": '`{"input_tokens": N}`: the tokens of a chat body\'s prompt.',
    "POST /v1/completions": "Continues texts or token ids, whole or streamed.",
    "DELETE /v1/requests/<id>": "Ends a running request at its next step; 404 when there is none of that id.",
    "POST /tokenize, /v1/tokenize": "Text or a conversation to token ids.",
    "POST /detokenize, /v1/detokenize": "Token ids to text.",
    "POST /apply-template, /v1/apply-template": '`{"prompt": text}`: what the model reads of a chat body.',
    "GET /v1/models, /v1/models/<id>": "The served model, its aliases and its numbers.",
    "GET /health, /v1/health": "200 with counters when it serves; 503 while loading and when the engine is dead.",
    "GET /alive": "200 while the process is up.",
    "GET /ready": "200 when the model serves, else 503.",
}

REPLIES = """\
## Replies

The shapes are OpenAI's. `index` is prompt × `n` + choice. `usage.completion_tokens` counts every token that was
computed, those that ended a reply included; text, token ids and log probabilities cover exactly the text that is
returned. A request is found by its id in `DELETE /v1/requests/<id>`: the header `X-Request-Id`, the field `request_id`
or the response's `id`; the first of them comes back as `X-Request-Id`.

**Continuing.** A final assistant message is the beginning of the reply: its text follows the opening of the
assistant's turn, and the reply holds only what comes after it.

**Log probabilities** are the model's own, natural logarithms over the whole vocabulary before bias, temperature and
cuts. Minus infinity is -9999.0.

- Chat: `logprobs` is a boolean and `top_logprobs` a count. A choice has `{"content": [{token, logprob, bytes,
  top_logprobs}]}`. `token` has U+FFFD for bytes that are no text by themselves, `bytes` are exact: joined, they are the
  text, and where the model wrote a control token, its name.
- Plain completions: `logprobs` is the count. A choice has four lists of the same length, `tokens`, `token_logprobs`,
  `top_logprobs` (objects from token to logprob) and `text_offset` (in characters of the choice's text). A token that is
  no text by itself is called `bytes:\\xe2\\x80`. Where two of the likeliest tokens have the same text, the less likely
  is called `token_id:N`. The token itself is always among its `top_logprobs`. With `echo` the prompt's tokens come
  first; the first of them has null. `max_tokens: 0` with `echo` scores a prompt and writes nothing.

**Token ids.** With `return_token_ids` a choice has `token_ids`. `prompt_token_ids` stand in the reply (chat) or in each
choice (plain completions).

**`timings`** has llama-server's numbers. `cache_n` + `prompt_n` are the prompt tokens, `predicted_n` the completion
tokens. `prompt_ms` is the time from a prompt's first step to its first token, `predicted_ms` from there to the last;
a choice of n tokens takes n − 1 decode steps, which is what `predicted_per_token_ms` and `predicted_per_second` count.
With several prompts or choices, times and steps are summed, so that the rates are those of a single reader; a prompt
counts once, with the time of its quickest choice.

**`pocketllm`**: `token_sha`, for each of `choices` the SHA-256 of all its computed token ids (int32, little-endian);
`seed`, null where several prompts drew their own; `time_to_first_token_ms` from arrival, of the first choice that has
one; `drafted` and `accepted` tokens."""

STREAMS = """\
## Streams

Server-sent events: `data: ` and a JSON object, then an empty line. What is wrong with a request is a plain HTTP error
before the first event. Then come, for each choice,

1. an opening: in a chat the role; in plain completions the prompt, with `echo` (together with its log probabilities,
   once they are known), and the `prompt_token_ids`, if asked for;
2. deltas: text that never splits a character and never holds a part of a stop string, with the log probabilities and
   token ids of the tokens that begin in it; joined, they are those of the reply without streaming;
3. a last chunk with `finish_reason`: `stop`, `length` or `cancelled`.

The last chunk that has choices carries `timings` and `pocketllm`; with `stream_options.include_usage` one more chunk
carries them, with `choices: []` and `usage`. The end is `data: [DONE]`. A stream that has nothing to say gets a
comment (`: `) now and then. An error after the first event is `data: {"error": ...}`, and the stream ends without
`[DONE]`."""

ERRORS = """\
## Errors

Under `/v1/` errors are OpenAI's:

```json
{"error": {"message": "...", "type": "invalid_request_error", "param": "messages.0.content", "code": null}}
```

elsewhere llama-server's:

```json
{"error": {"code": 400, "message": "...", "type": "invalid_request_error"}}
```

| status | type | when |
| --- | --- | --- |
| 400 | invalid_request_error | a field or the body is wrong; `param` is the field's path |
| 400 | invalid_request_error | prompt and reply do not fit: `code` is `context_length_exceeded`; see below |
| 404 | not_found_error | no such path, model or running request |
| 405 | invalid_request_error | the path takes other methods |
| 409 | invalid_request_error | the id belongs to a running request: `code` is `request_id_active` |
| 413 | invalid_request_error | the body is larger than the server takes |
| 429 | rate_limit_error | the queue is full; `Retry-After` says when to come again |
| 500 | server_error | the engine failed on this request |
| 503 | unavailable_error | the model is loading, or its engine is dead |
| 504 | timeout_error | the time was over before any choice was finished; choices that were are a 200 |

Beside `context_length_exceeded` stand `n_prompt_tokens` and `n_ctx`, in tokens; llama-server's type of that error is
`exceed_context_size_error`."""
