"""Fields that clients send and this server does not act on; each passes at the values that mean "do nothing".

A field leaves this table for its route's own when it is served.
"""

from __future__ import annotations

from typing import Annotated, Any

from pocketllm.protocol.fields import NotServed, RequestObject

_UNCONSTRAINED = "replies are not constrained to a grammar or schema"
_NO_REASONING = "reasoning is not told apart from the answer"
_NO_SLOTS = "requests are not bound to slots"
_PLAIN_SAMPLER = "the sampler has no such step"


class NotServedFields(RequestObject):
    """Of every route that generates text."""

    prompt_logprobs: Annotated[
        Any, NotServed('a prompt is scored by "echo" together with "logprobs" on /v1/completions')
    ] = None

    guided_json: Annotated[Any, NotServed(_UNCONSTRAINED)] = None
    guided_regex: Annotated[Any, NotServed(_UNCONSTRAINED, "")] = None
    guided_choice: Annotated[Any, NotServed(_UNCONSTRAINED, [])] = None
    guided_grammar: Annotated[Any, NotServed(_UNCONSTRAINED, "")] = None
    structured_outputs: Annotated[Any, NotServed(_UNCONSTRAINED, {})] = None
    grammar: Annotated[Any, NotServed(_UNCONSTRAINED, "")] = None
    json_schema: Annotated[Any, NotServed(_UNCONSTRAINED)] = None

    priority: Annotated[Any, NotServed("all requests are foreground work", "foreground", 0)] = None
    draft: Annotated[Any, NotServed("tokens are never drafted", True, False)] = None
    id_slot: Annotated[Any, NotServed(_NO_SLOTS, -1)] = None

    typical_p: Annotated[Any, NotServed(_PLAIN_SAMPLER, 1)] = None
    top_n_sigma: Annotated[Any, NotServed(_PLAIN_SAMPLER, -1)] = None
    xtc_probability: Annotated[Any, NotServed(_PLAIN_SAMPLER, 0)] = None
    dry_multiplier: Annotated[Any, NotServed(_PLAIN_SAMPLER, 0)] = None
    dynatemp_range: Annotated[Any, NotServed(_PLAIN_SAMPLER, 0)] = None
    mirostat: Annotated[Any, NotServed(_PLAIN_SAMPLER, 0)] = None
    repeat_penalty: Annotated[Any, NotServed('the field is called "repetition_penalty" here', 1)] = None


class NotServedChatFields(NotServedFields):
    """Of chat completions."""

    tools: Annotated[Any, NotServed("tools are not offered to the model", [])] = None
    tool_choice: Annotated[Any, NotServed("tools are not offered to the model", "auto", "none")] = None
    parallel_tool_calls: Annotated[Any, NotServed("tools are not offered to the model", True, False)] = None
    functions: Annotated[Any, NotServed("tools are not offered to the model", [])] = None
    function_call: Annotated[Any, NotServed("tools are not offered to the model", "auto", "none")] = None
    response_format: Annotated[Any, NotServed(_UNCONSTRAINED, {"type": "text"})] = None

    reasoning: Annotated[Any, NotServed(_NO_REASONING, {})] = None
    reasoning_effort: Annotated[Any, NotServed(_NO_REASONING, "none")] = None
    reasoning_format: Annotated[Any, NotServed(_NO_REASONING, "none")] = None
    thinking_mode: Annotated[Any, NotServed(_NO_REASONING, "auto")] = None
    thinking_budget: Annotated[Any, NotServed(_NO_REASONING, -1)] = None
    drop_thinking: Annotated[Any, NotServed(_NO_REASONING, False)] = None

    modalities: Annotated[Any, NotServed("replies are text", ["text"])] = None
    audio: Annotated[Any, NotServed("replies are text")] = None
    prediction: Annotated[Any, NotServed("predicted outputs are not read")] = None
    web_search_options: Annotated[Any, NotServed("the server has no access to the web")] = None
    verbosity: Annotated[Any, NotServed("the model is not told how long to answer", "medium")] = None


class NotServedCompletionFields(NotServedFields):
    """Of plain completions."""

    top_logprobs: Annotated[Any, NotServed('on this route "logprobs" is the count itself')] = None
    best_of: Annotated[Any, NotServed("one candidate is generated for each choice", 1)] = None
