"""What a file really is when it is not the checkpoint that its name promises."""

from __future__ import annotations

SNIFF_BYTES = 512
"""How much of a file's beginning `describe_content` wants to see."""

NO_PICKLE = (
    "PocketLLM never loads pickle files, because loading one runs whatever code lies in it: convert it to safetensors "
    "(in transformers: load the model, then save_pretrained(..., safe_serialization=True)) or to GGUF"
)
"""The advice wherever a pickled checkpoint is met."""

_WEB_PAGE = "as a server sends for an error or a login: download the file again"
_OLD_GGML = "the format before GGUF: get a GGUF of the model"

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "it is a GGUF file"),
    (
        b"version https://git-lfs",
        "it is a Git LFS pointer, a short text in the file's place: run `git lfs pull`, or download the file itself",
    ),
    (b"<!doctype html", f"it is an HTML page, {_WEB_PAGE}"),
    (b"<html", f"it is an HTML page, {_WEB_PAGE}"),
    (b"<?xml", f"it is an XML document, {_WEB_PAGE}"),
    (b"PK\x03\x04", f"it is a zip archive, as PyTorch writes its pickle files. {NO_PICKLE}"),
    (b"\x80\x02", f"it is a Python pickle. {NO_PICKLE}"),
    (b"\x80\x04", f"it is a Python pickle. {NO_PICKLE}"),
    (b"\x80\x05", f"it is a Python pickle. {NO_PICKLE}"),
    (b"\x1f\x8b", "it is a gzip archive: unpack it first"),
    (b"lmgg", f"it is a GGML file, {_OLD_GGML}"),
    (b"fmgg", f"it is a GGML file, {_OLD_GGML}"),
    (b"tjgg", f"it is a GGJT file, {_OLD_GGML}"),
)


def describe_content(head: bytes) -> str:
    """Say what a file is, judging by its first `SNIFF_BYTES` bytes, as a clause ("it is ...") with advice."""
    if not head:
        return "it is empty: was its download cut off?"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    for signature, description in _SIGNATURES:
        if head.startswith(signature) or text[: len(signature)].lower() == signature:
            return description
    if not any(head):
        return f"it begins with {len(head)} zero bytes: was its download cut off?"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
        return "it is a safetensors file: give the directory that holds it and its config.json"
    sample = text.split(b"\n")[0][:40].strip().decode("utf-8", errors="replace")
    if sample.isprintable() and "\ufffd" not in sample:
        return f"it begins with the text {sample!r}"
    return f"it begins with the bytes {head[:8].hex(' ')}"
