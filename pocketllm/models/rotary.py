"""Rotary position embedding: frequencies from a configuration, with the scalings that stretch a context.

Sources: Su et al., "RoFormer", 2021; Peng et al., "YaRN", 2023 (yarn, and dynamic as "NTK-aware" scaling); the
Llama 3.1 release for ``llama3``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pocketllm.errors import CheckpointError
from pocketllm.kernels.contract import Array, BoundOp, OpTable
from pocketllm.models.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary embedding.

    Attributes:
        inverse_frequencies: radians a position, one for each rotated pair.
        attention_factor: multiplies cosines and sines.
        dynamic_factor: above 0: frequencies depend on the sequence's length, which stretches beyond original_length.
        original_length: the length the model was trained at; 0 when nothing depends on it.
        interleaved: pairs are neighbours (2i, 2i + 1) rather than halves (i, i + d/2).
    """

    inverse_frequencies: tuple[float, ...]
    attention_factor: float = 1.0
    dynamic_factor: float = 0.0
    original_length: int = 0
    interleaved: bool = False

    @property
    def dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return 2 * len(self.inverse_frequencies)


def bind_angles(rotary: Rotary, ops: OpTable, divisors: Array | None = None) -> BoundOp:
    """The angles of a step's tokens; `divisors` are what a file has beside the configuration, for each frequency."""
    return ops.bind(
        "rotary_angles",
        {"divisors": divisors},
        inverse_frequencies=rotary.inverse_frequencies,
        attention_factor=rotary.attention_factor,
        dynamic_factor=rotary.dynamic_factor,
        original_length=rotary.original_length,
    )


def rotary_from_hf(
    reader: ConfigReader,
    *,
    head_dim: int,
    context_length: int,
    default_theta: float,
    default_share: float = 1.0,
    inert: tuple[str, ...] = (),
) -> Rotary:
    """From ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    `default_share` is how much of a head is rotated where the file does not say; `inert` are keys among the parameters
    that change nothing for the family.
    """
    scaling = reader.nested("rope_parameters")
    older = reader.nested("rope_scaling")
    theta = reader.number("rope_theta", default_theta, above=1.0)
    share = reader.number("partial_rotary_factor", default_share)
    if scaling is not None and older is not None and dict(scaling.raw) != dict(older.raw):
        raise reader.error("rope_scaling", "disagrees with rope_parameters; keep one of them")
    scaling = scaling or older
    if scaling is None:
        return Rotary(frequencies(theta, rotated(head_dim, share)))
    theta = scaling.number("rope_theta", theta, above=1.0)
    dim = rotated(head_dim, scaling.number("partial_rotary_factor", share))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling.ignore("rope_type", "type", *inert)
    rotary = _scaled(kind, scaling, theta, dim, context_length)
    scaling.finish()
    return rotary


def rotated(head_dim: int, share: float) -> int:
    """How many dimensions of a head are rotated, an even number."""
    dim = int(head_dim * min(share, 2.0))
    if share > 1 or dim < 2 or dim % 2:
        raise CheckpointError(
            f"a rotary share of {share:g} of head size {head_dim} gives no even number from 2 on "
            "(partial_rotary_factor, head_dim)"
        )
    return dim


def frequencies(theta: float, dim: int) -> tuple[float, ...]:
    """``theta ** (-2i / dim)``."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


def _scaled(kind: object, scaling: ConfigReader, theta: float, dim: int, context_length: int) -> Rotary:
    plain = frequencies(theta, dim)
    if kind == "default":
        return Rotary(plain)
    if kind == "linear":
        factor = scaling.number("factor")
        return Rotary(tuple(f / factor for f in plain))
    if kind == "dynamic":
        original = scaling.integer("original_max_position_embeddings", context_length)
        return Rotary(plain, dynamic_factor=scaling.number("factor"), original_length=original)
    if kind == "llama3":
        return Rotary(
            llama3(
                plain,
                factor=scaling.number("factor"),
                low=scaling.number("low_freq_factor"),
                high=scaling.number("high_freq_factor"),
                original=scaling.integer("original_max_position_embeddings"),
            )
        )
    if kind == "yarn":
        return _yarn_from_hf(scaling, theta, dim, context_length)
    raise scaling.error("rope_type", f"is {kind!r}; supported: default, linear, dynamic, llama3, yarn")


def llama3(plain: tuple[float, ...], *, factor: float, low: float, high: float, original: int) -> tuple[float, ...]:
    """Long wavelengths are slowed by `factor`, short ones kept, those between are blended."""

    def scaled(frequency: float) -> float:
        turns = original * frequency / (2 * math.pi)
        if turns < low:
            return frequency / factor
        if turns > high:
            return frequency
        blend = (turns - low) / (high - low)
        return (1 - blend) * frequency / factor + blend * frequency

    return tuple(map(scaled, plain))


def _yarn_from_hf(scaling: ConfigReader, theta: float, dim: int, context_length: int) -> Rotary:
    original = scaling.integer("original_max_position_embeddings", context_length)
    factor = scaling.number("factor", context_length / original)
    mscale = scaling.number("mscale", 0.0, above=-1.0)
    mscale_all = scaling.number("mscale_all_dim", 0.0, above=-1.0)
    default = _magnitude(factor, mscale) / _magnitude(factor, mscale_all) if mscale and mscale_all else 0.0
    return yarn(
        theta,
        dim,
        factor=factor,
        original=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=scaling.number("attention_factor", default or _magnitude(factor, 1.0)),
    )


def yarn(
    theta: float,
    dim: int,
    *,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> Rotary:
    """YaRN's frequencies and attention factor.

    Frequencies that turn more than `beta_fast` times over the original length are kept, those below `beta_slow` are
    slowed by `factor`, with a ramp between; cosines and sines grow by ``0.1 ln(factor) + 1`` unless told otherwise.
    """

    def index_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = index_of(beta_fast), index_of(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001

    def scaled(i: int, frequency: float) -> float:
        slow = min(max((i - first) / width, 0.0), 1.0)
        return frequency / factor * slow + frequency * (1 - slow)

    stretched = tuple(scaled(i, f) for i, f in enumerate(frequencies(theta, dim)))
    return Rotary(stretched, _magnitude(factor, 1.0) if attention_factor is None else attention_factor)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_from_gguf(reader: ConfigReader, arch: str, *, head_dim: int, context_length: int) -> Rotary:
    """From the ``<arch>.rope.*`` keys; factors for each frequency, if any, are a tensor (``rope_freqs.weight``)."""
    theta = reader.number(f"{arch}.rope.freq_base", 10000.0, above=1.0)
    dim = rotated(head_dim, reader.integer(f"{arch}.rope.dimension_count", head_dim) / head_dim)
    kind = reader.expect(f"{arch}.rope.scaling.type", ("none", "linear", "yarn"), "linear")
    older_linear = reader.number(f"{arch}.rope.scale_linear", 1.0)
    factor = reader.number(f"{arch}.rope.scaling.factor", older_linear)
    original = reader.integer(f"{arch}.rope.scaling.original_context_length", context_length)
    attention_factor = reader.number(f"{arch}.rope.scaling.attn_factor", 1.0)
    reader.ignore(f"{arch}.rope.scaling.finetuned")
    if kind == "yarn":
        return yarn(
            theta, dim, factor=factor, original=original, attention_factor=_magnitude(factor, 1.0) * attention_factor
        )
    slowed = tuple(f / factor for f in frequencies(theta, dim)) if kind == "linear" else frequencies(theta, dim)
    return Rotary(slowed)
