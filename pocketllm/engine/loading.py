"""From arguments to a serving engine: find the checkpoint, choose the backend, size the cache, load."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

from pocketllm import env
from pocketllm.checkpoint.opening import open_checkpoint
from pocketllm.checkpoint.store import ModelStore, damage_advice, served_model_id
from pocketllm.checkpoint.template import ChatTemplate, find_template
from pocketllm.checkpoint.tokenizer import load_tokenizer
from pocketllm.config import EngineArgs
from pocketllm.engine.cache import CacheManager
from pocketllm.engine.engine import Engine
from pocketllm.engine.memory import MIB, CachePlan, cache_budget, plan_cache
from pocketllm.engine.prefix_keys import PrefixKeys, checkpoint_identity, rope_class
from pocketllm.engine.prompts import FALLBACK_TEMPLATE
from pocketllm.engine.sampler import SamplingDefaults
from pocketllm.engine.scheduler import Scheduler
from pocketllm.engine.termination import end_token_ids
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.overriding import check_overrides, requested_overrides
from pocketllm.models.family import ModelConfig, family
from pocketllm.runtimes.base import Progress, Runtime, RuntimeOptions
from pocketllm.runtimes.devices import default_device
from pocketllm.runtimes.registry import Selection, select_backend
from pocketllm.types import Capabilities

logger = logging.getLogger(__name__)

MOST_SCORED_BYTES = 64 * MIB
"""Float32 logits of prompt rows that one step may hold."""


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def load_engine(args: EngineArgs, progress: Progress = quiet) -> Engine:
    """Load a model and start its engine.

    What can be refused is refused before a weight is read, but for kernels of the caller's own that turn out to refuse
    this model's sizes, or to have no part in it, when it is bound.

    Raises:
        ModelNotFoundError: no such model.
        CheckpointError: the checkpoint is damaged or not understood.
        UnsupportedFeatureError: the backend cannot run it, or there is no such device or backend option here.
        ConfigurationError: an argument cannot be used with it.
        KernelMismatchError: a kernel of the caller's own does not do what its op's contract says.
    """
    options = runtime_options(args)
    env.MEMORY_RESERVE_GIB.read()  # used late; what is wrong with it is said now
    path = ModelStore(env.CACHE_DIR.read()).resolve(args.model)
    with damage_advice(args.model), ExitStack() as cleanup, open_checkpoint(path) as checkpoint:
        config = family(checkpoint.model_type).parse_config(checkpoint.naming, checkpoint.config)
        tokenizer = load_tokenizer(checkpoint, model_vocab_size=config.vocab_size)
        template = find_template(checkpoint, tokenizer)
        end_ids, end_source = end_token_ids(args.backend_options, checkpoint, config, tokenizer)
        defaults = SamplingDefaults.from_generation_config(checkpoint.generation_config)
        selection = select_backend(args.backend, config, options)
        logger.info("backend %s on %s: %s", selection.backend.name, options.device, selection.reason)
        check_overrides(options.overrides, selection.backend.name, device=options.device, dtype=options.dtype)
        runtime = cleanup.enter_context(closing(selection.backend.load()(config, options)))
        runtime.load(checkpoint, progress)
        cache = _allocate(args, config, runtime)
        numerics = runtime.numerics_id
        keys = None
        if args.prefix_cache:
            keys = PrefixKeys(f"{numerics} {checkpoint_identity(checkpoint)}", rope_class(config))
        details = {
            "eos_source": end_source,
            "numerics_id": numerics,
            "template_source": "checkpoint" if template is not None else "fallback",
            "parameters": sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
            "weight_bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        }
        engine = Engine(
            runtime,
            config=config,
            tokenizer=tokenizer,
            template=template or ChatTemplate.for_tokenizer(FALLBACK_TEMPLATE, tokenizer),
            capabilities=_capabilities(args, config, options, selection, runtime, cache, details),
            scheduler=Scheduler(
                CacheManager(cache.blocks, args.block_size, states=cache.states, keys=keys),
                max_sequences=args.max_num_seqs,
                prefill_chunk=args.prefill_chunk,
                decode_share=args.decode_share,
                scored_rows=max(1, MOST_SCORED_BYTES // (4 * config.vocab_size)),
            ),
            end_ids=end_ids,
            defaults=defaults,
            model_id=served_model_id(args.model, path),
            max_queue=args.max_queue,
            step_timeout=args.step_timeout,
        )
        cleanup.pop_all()  # the engine closes the runtime from here on
        return engine


def runtime_options(args: EngineArgs) -> RuntimeOptions:
    """What a runtime is made with, ``auto`` resolved; UnsupportedFeatureError for what there is not."""
    unknown = args.backend_options.keys() - {"eos_token_id"}
    if unknown:
        raise UnsupportedFeatureError(f"no backend has the option {min(unknown)!r}; there is: eos_token_id")
    if args.device.startswith("npu"):
        raise UnsupportedFeatureError(
            f"device {args.device!r} (Ascend) needs its vendor's toolkit, CANN, which is missing here: "
            "give cpu or cuda[:i]"
        )
    device = default_device() if args.device == "auto" else args.device
    own_dtype = "bfloat16" if device.startswith("cuda") else "float32"
    dtype = own_dtype if args.dtype == "auto" else args.dtype
    return RuntimeOptions(
        device=device,
        dtype=dtype,
        block_size=args.block_size,
        threads=args.threads,
        overrides=requested_overrides(args.kernels),
    )


def _allocate(args: EngineArgs, config: ModelConfig, runtime: Runtime) -> CachePlan:
    cache = plan_cache(
        args,
        context_length=config.context_length,
        bytes_per_block=runtime.bytes_per_block,
        bytes_per_state=runtime.bytes_per_state,
        available=cache_budget(args, runtime.device_memory()),
    )
    if cache.max_model_len > config.context_length:
        logger.warning(
            "the context window is %d tokens, and the model was made for %d: what lies beyond may make no sense",
            cache.max_model_len,
            config.context_length,
        )
    if cache.shrunk_from is not None:
        logger.warning(
            "the context window is %d tokens instead of %d: that is what the memory holds",
            cache.max_model_len,
            cache.shrunk_from,
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB",
        cache.blocks,
        args.block_size,
        cache.blocks * runtime.bytes_per_block / MIB,
    )
    if cache.states:
        logger.info("recurrent states: %d slots, %.1f MiB", cache.states, cache.states * runtime.bytes_per_state / MIB)
    runtime.allocate(cache.blocks, cache.states)
    return cache


def _capabilities(
    args: EngineArgs,
    config: ModelConfig,
    options: RuntimeOptions,
    selection: Selection,
    runtime: Runtime,
    cache: CachePlan,
    details: Mapping[str, Any],
) -> Capabilities:
    return Capabilities(
        backend=selection.backend.name,
        backend_reason=selection.reason,
        device=options.device,
        dtype=options.dtype,
        model_type=config.model_type,
        max_sequences=args.max_num_seqs,
        max_model_len=cache.max_model_len,
        chunked_prefill=True,
        paged_kv=True,
        prefix_cache=args.prefix_cache,
        batch_invariant=runtime.batch_invariant,
        details=details,
    )
