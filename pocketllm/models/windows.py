"""Sliding attention windows, layer by layer, as Qwen's configurations spell them."""

from __future__ import annotations

from pocketllm.models.config_reader import ConfigReader


def windows_from_hf(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """How many keys a token of each layer sees, its own included; 0 is all of them.

    ``sliding_window`` acts on layers from ``max_window_layers`` on, and only with ``use_sliding_window``;
    ``layer_types``, where given, names the layers one by one.
    """
    used = reader.flag("use_sliding_window")
    window = reader.integer("sliding_window", 4096, least=1) if used else 0
    first = reader.integer("max_window_layers", 28, least=0)
    reader.ignore("sliding_window")
    kinds = reader.get("layer_types")
    if kinds is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.error("layer_types", f"does not name {layers} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", f"has {kind!r}; supported: full_attention, sliding_attention")
    if not used and "sliding_attention" in kinds:
        raise reader.error("layer_types", "has sliding_attention while use_sliding_window is off")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
