"""A cached prefix as bytes, for host memory or a file: its tokens, its blocks and the recurrent states at its end.

Layout, little-endian: a header (magic, version, bytes of the identity, rotary length, tokens, bytes of the blocks,
bytes of the states), the identity in UTF-8, token ids as int32, the blocks, the states, and the BLAKE2b hash of all
that comes before it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pocketllm.engine.cache import CacheManager
from pocketllm.engine.prefix_keys import PrefixKeys
from pocketllm.errors import InvalidRequestError
from pocketllm.runtimes.base import Runtime

_MAGIC = b"PLLMPRFX"
_VERSION = 1
_HEADER = struct.Struct("<8sHHQQQQ")
_CHECKSUM_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Image:
    """The parts of an image."""

    identity: str
    rope_length: int
    token_ids: list[int]
    blocks: bytes
    states: bytes


def export_prefix(cache: CacheManager, runtime: Runtime, token_ids: Sequence[int], rope_length: int) -> bytes | None:
    """The longest beginning of the tokens that a sequence could go on from; None when there is none.

    Args:
        cache: the engine's cache.
        runtime: where it lies.
        token_ids: a prompt.
        rope_length: the rotary length that its entries were computed with.
    """
    keys = _keys(cache)
    chain = keys.chain(keys.root(rope_length), token_ids, cache.block_size)
    blocks = cache.find(chain)
    if not blocks:
        return None
    snapshot = cache.states.pool.find(chain[len(blocks) - 1])
    return _pack(
        _Image(
            identity=keys.identity,
            rope_length=rope_length,
            token_ids=list(token_ids[: len(blocks) * cache.block_size]),
            blocks=runtime.export_blocks(blocks),
            states=b"" if snapshot is None else runtime.export_states([snapshot]),
        )
    )


def import_prefix(cache: CacheManager, runtime: Runtime, data: bytes) -> int:
    """Put an exported prefix into the cache, where sequences find it; gives the number of its tokens.

    Raises:
        InvalidRequestError: the image is damaged, or of another model, runtime or version; or the cache has no room for
            it. Nothing that was cached is lost then, but for what room was made of.
    """
    keys = _keys(cache)
    image = _unpack(data)
    if image.identity != keys.identity:
        raise InvalidRequestError(
            "the prefix was computed by another model, or by this one in another way: it is of "
            f"{image.identity!r}, and here is {keys.identity!r}; compute the prompt anew"
        )
    chain = keys.chain(keys.root(image.rope_length), image.token_ids, cache.block_size)
    if len(chain) * cache.block_size != len(image.token_ids) or bool(image.states) != cache.states.exist:
        raise _damaged("its parts do not belong together")
    if len(cache.find(chain)) < len(chain):
        _place(cache, runtime, chain, image)
    return len(image.token_ids)


def _place(cache: CacheManager, runtime: Runtime, chain: list[bytes], image: _Image) -> None:
    """Bring in the blocks that are not there already, and the states at the end."""
    there = cache.blocks_of(chain[: cache.chained(chain, len(chain))])
    missing = chain[len(there) :]
    cache.blocks.hold(there)  # or making room could evict them
    blocks = cache.blocks.take(len(missing))
    slots = cache.states.pool.take(1 if image.states else 0)
    try:
        if blocks is None or slots is None:
            raise InvalidRequestError(
                f"the cache has no room for the prefix's {len(missing)} blocks: {cache.blocks.free} of "
                f"{cache.blocks.total} are free, and {cache.states.pool.free} slots of recurrent states; try again "
                "when fewer requests run"
            )
        try:
            runtime.import_blocks(blocks, image.blocks[len(there) * runtime.bytes_per_block :])
            runtime.import_states(slots, image.states)
        except ValueError as error:
            raise _damaged(str(error)) from None
        blocks = [cache.blocks.publish(block, key) for block, key in zip(blocks, missing, strict=True)]
        slots = [cache.states.pool.publish(slot, chain[-1]) for slot in slots]
    finally:
        cache.blocks.release(reversed([*there, *(blocks or [])]))
        cache.states.pool.release(slots or [])


def _pack(image: _Image) -> bytes:
    identity = image.identity.encode()
    sizes = (len(image.token_ids), len(image.blocks), len(image.states))
    header = _HEADER.pack(_MAGIC, _VERSION, len(identity), image.rope_length, *sizes)
    tokens = np.asarray(image.token_ids, dtype="<i4").tobytes()
    body = b"".join((header, identity, tokens, image.blocks, image.states))
    return body + _checksum(body)


def _unpack(data: bytes) -> _Image:
    if len(data) < _HEADER.size + _CHECKSUM_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise _damaged("it does not begin like one")
    body, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    _, version, identity_bytes, rope_length, tokens, block_bytes, state_bytes = _HEADER.unpack_from(body)
    if version != _VERSION:
        raise InvalidRequestError(
            f"the prefix was saved as version {version} of the format, and this program reads {_VERSION}: save it anew"
        )
    ends = np.cumsum([_HEADER.size, identity_bytes, 4 * tokens, block_bytes, state_bytes], dtype=object)
    if ends[-1] != len(body) or checksum != _checksum(body):
        raise _damaged("it was cut short or changed")
    identity, token_ids, blocks, states = (body[start:end] for start, end in pairwise(ends))
    return _Image(
        identity=identity.decode(errors="replace"),
        rope_length=rope_length,
        token_ids=np.frombuffer(token_ids, dtype="<i4").tolist(),
        blocks=blocks,
        states=states,
    )


def _keys(cache: CacheManager) -> PrefixKeys:
    if cache.keys is None:
        raise InvalidRequestError("the prefix cache is off, so there is none to save or restore: turn it on")
    return cache.keys


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def _damaged(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"this is no saved prefix, or a damaged one ({why}): save it anew")
