"""A llama of two layers with random weights and a vocabulary of bytes, in a GGUF that every engine reads."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

WIDTH, HEADS, LAYERS, INNER, VOCABULARY = 64, 2, 2, 96, 258


def write_tiny_gguf(path: Path) -> Path:
    """Write it to `path`; float32 throughout."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    _add_vocabulary(writer)
    rng = np.random.default_rng(0)
    for name, shape in _shapes().items():
        scale = 1.0 if name == "token_embd.weight" else 2.0 / shape[-1] ** 0.5
        values = np.ones(shape) if "norm" in name else rng.standard_normal(shape) * scale
        if name == "output.weight":
            values[128:] = 0.0  # replies are ASCII: no text is held back for a character to become complete
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """GPT-2's spelling of the 256 bytes, an end token, and one merge, without which llama.cpp refuses the file."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    spelling = {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(moved)}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(spelling[byte] for byte in range(256)), "<|end|>", "th"])
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(256)
    writer.add_add_bos_token(False)


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, WIDTH),
        "output.weight": (VOCABULARY, WIDTH),
        "output_norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        own = {
            "attn_norm": (WIDTH,),
            "ffn_norm": (WIDTH,),
            "attn_q": (WIDTH, WIDTH),
            "attn_k": (WIDTH, WIDTH),
            "attn_v": (WIDTH, WIDTH),
            "attn_output": (WIDTH, WIDTH),
            "ffn_gate": (INNER, WIDTH),
            "ffn_up": (INNER, WIDTH),
            "ffn_down": (WIDTH, INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes
