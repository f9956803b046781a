"""The common half of every route that generates text: from checked fields and token ids to a response."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar

from flask import Response, request

from pocketllm.errors import InvalidRequestError
from pocketllm.protocol.body import parse_body
from pocketllm.protocol.fields import RequestObject
from pocketllm.protocol.openai.reply import ReplyHead
from pocketllm.protocol.openai.sampling import GenerationFields, checked_request_id
from pocketllm.protocol.validation import validated
from pocketllm.server import access_log
from pocketllm.server.generation import Generation
from pocketllm.server.respond import Reply, streamed_response, whole_response
from pocketllm.server.state import ServerState

if TYPE_CHECKING:
    from pocketllm.engine.engine import Engine

REQUEST_ID_HEADER = "X-Request-Id"

Fields = TypeVar("Fields", bound=RequestObject)


def request_fields(table: type[Fields]) -> Fields:
    """The current request's body as the fields of `table`; InvalidRequestError when it is none."""
    return validated(table, parse_body(request.get_data(cache=False)))


def generate(
    state: ServerState,
    engine: Engine,
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    id_prefix: str,
    reply_of: Callable[[ReplyHead], Reply],
) -> Response:
    """Run `prompts` (token ids) as `fields` say and answer the current request, whole or streamed.

    Raises:
        PocketLLMError: what keeps the reply from beginning; for a whole reply also what ends it.
    """
    head = ReplyHead(
        id=id_prefix + uuid.uuid4().hex,
        created=int(time.time()),
        model=state.model_id(engine),
        system_fingerprint=_fingerprint(engine),
    )
    client_ids = _client_ids(fields)
    ids = (*client_ids, head.id)
    generation = Generation(
        engine,
        prompts,
        fields.sampling_params(),
        prefill_only=fields.prefill_only,
        scores_prompt=fields.scores_prompt,
        request_id=head.id,
        timeout=_timeout(fields, state),
        client_gone=request.environ.get("waitress.client_disconnected", _never),
    )
    access_log.note(next(iter(client_ids), head.id), generation)
    with ExitStack() as cleanup:
        state.active.add(ids, generation)
        cleanup.callback(state.active.remove, ids)
        cleanup.callback(generation.close)
        try:
            generation.submit()
        except InvalidRequestError as error:
            error.param = fields.field_name(error.param)
            raise
        if fields.stream:
            response = streamed_response(
                generation,
                reply_of(head),
                includes_usage=fields.includes_usage,
                ping_interval=state.args.sse_ping_interval,
            )
            # Not left to the stream's generator: one that was never started does not run its `finally`.
            response.call_on_close(cleanup.pop_all().close)
        else:
            response = whole_response(generation, reply_of(head))
    response.headers[REQUEST_ID_HEADER] = next(iter(client_ids), head.id)
    return response


def _client_ids(fields: GenerationFields) -> tuple[str, ...]:
    """The ids that the client gave the request, the header's first, each once."""
    header = request.headers.get(REQUEST_ID_HEADER)
    if header is not None:
        try:
            checked_request_id(header)
        except ValueError as error:
            message = f"The header {REQUEST_ID_HEADER} is not usable: give {error}."
            raise InvalidRequestError(message, param=REQUEST_ID_HEADER) from None
    return tuple(dict.fromkeys(value for value in (header, fields.request_id) if value is not None))


def _timeout(fields: GenerationFields, state: ServerState) -> float | None:
    limits = [limit for limit in (fields.timeout, state.args.request_timeout) if limit is not None]
    return min(limits, default=None)


def _fingerprint(engine: Engine) -> str:
    capabilities = engine.capabilities
    return f"{capabilities.backend}-{capabilities.device}-{capabilities.dtype}"


def _never() -> bool:
    return False
