"""``POST /tokenize``, ``/detokenize`` and ``/apply-template``: what the model reads, without running it."""

from __future__ import annotations

from flask import Blueprint, Response, request

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.body import parse_body
from pocketllm.protocol.openai.chat import ChatRequest
from pocketllm.protocol.openai.tokenization import (
    DetokenizeRequest,
    TokenizeContent,
    TokenizeMessages,
    counted_body,
    pieces_body,
    tokenize_fields,
)
from pocketllm.server.answering import request_fields
from pocketllm.server.respond import json_response
from pocketllm.server.state import ServerState


def blueprint(state: ServerState) -> Blueprint:
    """The routes of the tokenizer and the template."""
    routes = Blueprint("tokenization", __name__)

    @routes.post("/tokenize")
    @routes.post("/v1/tokenize")
    def tokenize() -> Response:
        engine = state.engine
        tokenizer = engine.tokenizer
        fields = tokenize_fields(parse_body(request.get_data(cache=False)))
        if isinstance(fields, TokenizeContent):
            token_ids = tokenizer.encode(
                fields.content,
                add_special_tokens=bool(fields.add_special),
                parse_special=fields.parse_special is not False,
            )
            if not fields.with_pieces:
                return json_response({"tokens": token_ids})
            return json_response(pieces_body([(token_id, tokenizer.token_bytes(token_id)) for token_id in token_ids]))
        if isinstance(fields, TokenizeMessages):
            token_ids = engine.render_chat(fields.template_messages(), **fields.rendering())
        else:
            token_ids = tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        texts = [tokenizer.token_bytes(token_id) for token_id in token_ids] if fields.return_token_strs else None
        return json_response(counted_body(token_ids, engine.capabilities.max_model_len, texts))

    @routes.post("/detokenize")
    @routes.post("/v1/detokenize")
    def detokenize() -> Response:
        engine = state.engine
        fields = request_fields(DetokenizeRequest)
        try:
            text = engine.tokenizer.decode(fields.tokens)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="tokens") from None
        return json_response({"content": text, "prompt": text})

    @routes.post("/apply-template")
    @routes.post("/v1/apply-template")
    def apply_template() -> Response:
        engine = state.engine
        fields = request_fields(ChatRequest)
        return json_response({"prompt": engine.chat_prompt(fields.template_messages(), **fields.rendering()).text})

    return routes
