"""What `inspect_model` finds, as JSON for programs and as tables for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pocketllm.engine.inspection import Inspection, TemplateFacts, TokenizerFacts

MOST_TOKENS = 8
"""Control tokens that are shown to people; JSON has all."""
PIPED_COLUMNS = 120
"""Width of the tables where no terminal has one."""


def write_json(found: Inspection, out: TextIO, *, tensors: bool, template: bool) -> None:
    """The facts under their own names, on one line; tensors and the template's texts only when asked for."""
    facts = dataclasses.asdict(found)
    if not tensors:
        del facts["tensors"]
    if not template:
        del facts["chat_template"]["source"], facts["chat_template"]["tool_use_source"]
    out.write(json.dumps(facts, ensure_ascii=False) + "\n")


def write_tables(found: Inspection, out: TextIO, *, tensors: bool, template: bool) -> None:
    """The facts, the formats and the backends; then tensors and the template's texts when asked for."""
    console = Console(file=out, highlight=False, width=None if out.isatty() else PIPED_COLUMNS)
    for part in _parts(found, tensors=tensors, template=template):
        console.print(part)


def _parts(found: Inspection, *, tensors: bool, template: bool) -> Iterator[RenderableType]:
    yield _facts_table(found)
    yield _table(
        "format",
        "tensors",
        "parameters",
        "size",
        rows=(
            (name, f"{share.tensors}", _count(share.parameters), _size(share.bytes))
            for name, share in found.formats.items()
        ),
    )
    refusals = found.backends.refusals.items()
    yield _table(
        "backend", "can run it", rows=((name, "yes" if why is None else f"no: {why}") for name, why in refusals)
    )
    if tensors:
        yield _table(
            "tensor",
            "shape",
            "format",
            "size",
            rows=(
                (tensor.name, " x ".join(map(str, tensor.shape)), tensor.format, _size(tensor.nbytes))
                for tensor in found.tensors
            ),
        )
    if template:
        yield from _template_texts(found.chat_template)


def _facts_table(found: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, text in _facts(found):
        table.add_row(name, _cell(text))
    return table


def _facts(found: Inspection) -> Iterator[tuple[str, str]]:
    yield "model", f"{found.model}, family {found.model_type}, {found.container}"
    yield "path", found.path
    yield "size", f"{_count(found.parameters)} parameters in {_size(found.weight_bytes)}"
    yield "shape", f"{found.layers} layers, hidden size {found.hidden_size}, vocabulary {found.vocab_size}"
    yield "context", f"{found.context_length} tokens"
    yield "KV cache", _cache(found)
    yield "tokenizer", _tokenizer(found.tokenizer)
    yield "control tokens", _control_tokens(found.tokenizer)
    yield "ends a reply", f"{_ends(found)} (from: {found.eos_source})"
    yield "chat template", _template(found.chat_template)
    yield "backend auto", f"{found.backends.auto or 'none'} on {found.backends.device}: {found.backends.reason}"


def _cache(found: Inspection) -> str:
    cache = found.cache
    whole = _size(cache.bytes_per_token * found.context_length)
    text = f"{cache.bytes_per_token} bytes a token in {cache.dtype} ({whole} for the whole context)"
    if cache.windows:
        text += f", windows of {', '.join(map(str, cache.windows))} tokens"
    if cache.state_bytes:
        text += f", and {_size(cache.state_bytes)} of state a sequence"
    return text


def _tokenizer(tokenizer: TokenizerFacts) -> str:
    roles = "".join(f", {role.removesuffix('_token')} {text}" for role, text in tokenizer.roles.items())
    begins = "prompts begin with bos" if tokenizer.add_bos_token else "nothing is put before prompts"
    return f"{tokenizer.kind}, {tokenizer.vocab_size} tokens{roles}; {begins}"


def _control_tokens(tokenizer: TokenizerFacts) -> str:
    shown = [f"{text} {token}" for text, token in tokenizer.special_tokens.items()]
    more = [f"and {len(shown) - MOST_TOKENS} more (--json)"] if len(shown) > MOST_TOKENS else []
    return ", ".join(shown[:MOST_TOKENS] + more) or "none"


def _ends(found: Inspection) -> str:
    texts = {token: text for text, token in found.tokenizer.special_tokens.items()}
    return ", ".join(f"{texts.get(token, '')} {token}".lstrip() for token in found.eos_token_ids) or "nothing"


def _template(template: TemplateFacts) -> str:
    if template.origin == "fallback":
        return "none in the checkpoint: roles and contents in plain words"
    subjects = {"tools": template.names_tools, "thinking": template.names_thinking}
    return "the checkpoint's, " + ", ".join(
        f"{'names' if named else 'does not name'} {subject}" for subject, named in subjects.items()
    )


def _template_texts(template: TemplateFacts) -> Iterator[RenderableType]:
    yield Text(_printable(template.source))
    if template.tool_use_source is not None:
        yield Text("\nWith tools:\n" + _printable(template.tool_use_source))


def _table(*header: str, rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(*header, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(text: str) -> Text:
    return Text(_printable(text), overflow="fold")


def _printable(text: str) -> str:
    """A checkpoint's text without what would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _count(parameters: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.4g} {name}"
    return str(parameters)


def _size(size: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
