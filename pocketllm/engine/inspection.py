"""What a checkpoint is and which backends can run it, from its headers alone: no weight is read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pocketllm import env
from pocketllm.checkpoint.checkpoint import Checkpoint, TensorInfo
from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.checkpoint.store import ModelStore, served_model_id
from pocketllm.checkpoint.template import ChatTemplate, find_template
from pocketllm.checkpoint.tokenizer import Tokenizer, load_tokenizer, optional_json_object
from pocketllm.config import BACKENDS, EngineArgs
from pocketllm.engine.loading import runtime_options
from pocketllm.engine.prompts import FALLBACK_TEMPLATE
from pocketllm.engine.termination import end_token_ids
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.models.family import ModelConfig, PagedCache, family
from pocketllm.runtimes.base import RuntimeOptions
from pocketllm.runtimes.registry import select_backend
from pocketllm.runtimes.weights import check_weights

_ACTIVATION_BYTES = {"float32": 4, "bfloat16": 2}
_THINKING = re.compile(r"think|reasoning")


@dataclass(frozen=True, slots=True)
class FormatShare:
    """What of a checkpoint is stored in one format."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """A checkpoint's tokenizer.

    Attributes:
        kind: the algorithm, and for GGUF the name of its splitting rule.
        vocab_size: the largest token id plus one.
        add_bos_token: whether prompts get the BOS token.
        roles: the texts of ``bos_token``, ``eos_token`` and so on.
        special_tokens: the ids of the control tokens by their texts.
    """

    kind: str
    vocab_size: int
    add_bos_token: bool
    roles: Mapping[str, str]
    special_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """A chat template.

    Attributes:
        origin: ``checkpoint``, or ``fallback`` where that has none.
        source: the template.
        tool_use_source: the one for conversations with tools, where there is another.
        names_tools, names_thinking: whether its text speaks of tools, of thinking or reasoning.
    """

    origin: str
    source: str
    tool_use_source: str | None
    names_tools: bool
    names_thinking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What a sequence keeps while it runs.

    Attributes:
        dtype: of activations, and so of keys and values.
        bytes_per_token: what one more token takes over all layers, as long as no window is full.
        windows: the windows, in tokens, beyond which some layer keeps nothing.
        state_bytes: what a sequence of any length takes.
    """

    dtype: str
    bytes_per_token: int
    windows: tuple[int, ...]
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """Who can run the model here.

    Attributes:
        device: where ``auto`` computes.
        refusals: for every backend what asking for it by name would say, or None where it can.
        auto: the backend that ``auto`` takes, or None.
        reason: why it takes that one, or none.
    """

    device: str
    refusals: Mapping[str, str | None]
    auto: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What `inspect_model` finds.

    Attributes:
        model: the id under which it would be served.
        path: where it lies.
        container: ``gguf`` or ``safetensors``.
        model_type: the family.
        parameters, weight_bytes: of all tensors.
        formats: the tensors by format, those with the most bytes first.
        context_length: tokens that the model was made for.
        vocab_size: rows of its embedding.
        hidden_size: width of the residual stream.
        layers: how many there are.
        tokenizer, chat_template, cache, backends: see their classes.
        eos_token_ids: the ids that end a reply.
        eos_source: who says so, see `end_token_ids`.
        tensors: every tensor, in the order of the file.
    """

    model: str
    path: str
    container: str
    model_type: str
    parameters: int
    weight_bytes: int
    formats: Mapping[str, FormatShare]
    context_length: int
    vocab_size: int
    hidden_size: int
    layers: int
    tokenizer: TokenizerFacts
    eos_token_ids: tuple[int, ...]
    eos_source: str
    chat_template: TemplateFacts
    cache: CacheFacts
    backends: BackendFacts
    tensors: tuple[TensorInfo, ...]


def inspect_model(model: str) -> Inspection:
    """Look at a model as loading it would, up to its weights.

    Args:
        model: a known name, a path or a Hugging Face id.

    Raises:
        ModelNotFoundError: no such model.
        CheckpointError: the checkpoint is damaged or not understood.
    """
    args = EngineArgs(model=model)
    options = runtime_options(args)
    path = ModelStore(env.CACHE_DIR.read()).resolve(model)
    with open_checkpoint(path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        check_weights(checkpoint, config)
        tokenizer = load_tokenizer(checkpoint, model_vocab_size=config.vocab_size)
        end_ids, end_source = end_token_ids(args.backend_options, checkpoint, config, tokenizer)
        tensors = tuple(checkpoint.tensors.values())
        whole = _share(tensors)
        return Inspection(
            model=served_model_id(model, path),
            path=str(checkpoint.path),
            container="gguf" if checkpoint.naming == "gguf" else "safetensors",
            model_type=config.model_type,
            parameters=whole.parameters,
            weight_bytes=whole.bytes,
            formats=_formats(tensors),
            context_length=config.context_length,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=len(family(config.model_type).cache_layout(config)),
            tokenizer=_tokenizer_facts(checkpoint, tokenizer),
            eos_token_ids=tuple(sorted(end_ids)),
            eos_source=end_source,
            chat_template=_template_facts(find_template(checkpoint, tokenizer)),
            cache=_cache_facts(config, options),
            backends=_backend_facts(config, options),
            tensors=tensors,
        )


def _share(tensors: Iterable[TensorInfo]) -> FormatShare:
    tensors = list(tensors)
    return FormatShare(
        len(tensors), sum(math.prod(tensor.shape) for tensor in tensors), sum(tensor.nbytes for tensor in tensors)
    )


def _formats(tensors: tuple[TensorInfo, ...]) -> dict[str, FormatShare]:
    names = dict.fromkeys(tensor.format for tensor in tensors)
    shares = {name: _share(tensor for tensor in tensors if tensor.format == name) for name in names}
    return dict(sorted(shares.items(), key=lambda item: -item[1].bytes))


def _tokenizer_facts(checkpoint: Checkpoint, tokenizer: Tokenizer) -> TokenizerFacts:
    return TokenizerFacts(
        kind=_tokenizer_kind(checkpoint),
        vocab_size=tokenizer.vocab_size,
        add_bos_token=tokenizer.add_bos_token,
        roles=tokenizer.template_variables,
        special_tokens={tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)},
    )


def _tokenizer_kind(checkpoint: Checkpoint) -> str:
    if checkpoint.naming == "gguf":
        keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre")
        return ", ".join(str(checkpoint.config[key]) for key in keys if key in checkpoint.config)
    return str(optional_json_object(checkpoint.path / "tokenizer.json")["model"].get("type", "not named"))


def _template_facts(template: ChatTemplate | None) -> TemplateFacts:
    found = template or ChatTemplate(FALLBACK_TEMPLATE)
    text = found.source + (found.tool_use_source or "")
    return TemplateFacts(
        origin="fallback" if template is None else "checkpoint",
        source=found.source,
        tool_use_source=found.tool_use_source,
        names_tools=re.search(r"\btools\b", text) is not None,
        names_thinking=_THINKING.search(text) is not None,
    )


def _cache_facts(config: ModelConfig, options: RuntimeOptions) -> CacheFacts:
    bytes_per_token, windows, state_bytes = 0.0, set(), 0
    for layer in family(config.model_type).cache_layout(config):
        for cache in layer.values():
            if not isinstance(cache, PagedCache):
                state_bytes += math.prod(cache.shape) * np.dtype(cache.dtype).itemsize
            elif cache.shares is None:
                activation = cache.dtype == "activation"
                itemsize = _ACTIVATION_BYTES[options.dtype] if activation else np.dtype(cache.dtype).itemsize
                bytes_per_token += math.prod(cache.entry_shape) * itemsize / cache.tokens_per_entry
                windows |= {cache.window} - {None}
    return CacheFacts(
        dtype=options.dtype,
        bytes_per_token=math.ceil(bytes_per_token),
        windows=tuple(sorted(window for window in windows if window is not None)),
        state_bytes=state_bytes,
    )


def _backend_facts(config: ModelConfig, options: RuntimeOptions) -> BackendFacts:
    refusals = {name: _choice(name, config, options) for name in BACKENDS}
    try:
        selection = select_backend("auto", config, options)
    except UnsupportedFeatureError as error:
        return BackendFacts(device=options.device, refusals=refusals, auto=None, reason=str(error))
    return BackendFacts(device=options.device, refusals=refusals, auto=selection.backend.name, reason=selection.reason)


def _choice(name: str, config: ModelConfig, options: RuntimeOptions) -> str | None:
    try:
        select_backend(name, config, options)
    except UnsupportedFeatureError as error:
        return str(error)
    return None
