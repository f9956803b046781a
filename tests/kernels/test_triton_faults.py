"""Triton kernels with one fault in their source each: the comparison finds all of them, and none in the sound source.

No fault reads or writes beyond an array, which would end the process. Attention is given longer contexts than elsewhere
and short segments, so that keys come in several blocks and are merged.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pocketllm.kernels.checking.arrays import BFLOAT16, FLOAT32, backend
from pocketllm.kernels.checking.comparison import KernelMismatchError, check
from pocketllm.kernels.contract import OpSpec
from pocketllm.kernels.registry import implementation, spec

BACKEND = backend("triton")
SEGMENT = 64
LONGER = {"paged_attention": {"context": (70, 100), "block_size": (2, 16), "S": (1, 2), "kv_heads": (1, 2)}}

FAULTS = {
    "rms_norm: tail not masked": ("rms_norm", "x + row + column, mask=inside, other=0.0", "x + row + column % n"),
    "linear: tail of the inputs left out": ("linear", "range(0, K, BK)", "range(0, K // BK * BK, BK)"),
    "linear: bias of the wrong column": ("linear", "bias + column,", "bias + column // 2,"),
    "rms_norm: no cast to float32": ("rms_norm", "wide = widen(total)", "wide = total"),
    "swiglu: the negative side mirrored": ("swiglu", "sigmoid(z)", "sigmoid(tl.abs(z))"),
    "attention: block table off by one": (
        "paged_attention",
        "key_position // BLOCK_SIZE, mask",
        "tl.maximum(key_position // BLOCK_SIZE - 1, 0), mask",
    ),
    "attention: a query sees the next key": ("paged_attention", "(behind >= 0)", "(behind >= -1)"),
    "attention: window one too wide": ("paged_attention", "behind < WINDOW", "behind <= WINDOW"),
    "attention: first blocks of the window left out": (
        "paged_attention",
        "oldest // KEYS * KEYS)",
        "(oldest // KEYS + 1) * KEYS)",
    ),
    "attention: mass not rescaled": ("paged_attention", "mass = mass * scaling +", "mass = mass +"),
    "attention: values not rescaled": ("paged_attention", "mixed * scaling[:, None])", "mixed)"),
    "attention: segments merged with one scale": ("paged_attention", "* others[:, None]", "* own[:, None]"),
    "attention: wrong head": ("paged_attention", "kv_head * GROUP + member", "member * kv_heads + kv_head"),
    "sample: one of the equal logits too many": ("sample", "rank < kept", "rank <= kept"),
    "sample: noise of another id": ("sample", "token // 4, position", "token // 2, position"),
    "sample: nucleus of another share": ("sample", "tl.ceil(top_p", "tl.ceil(top_p * top_p"),
    "score: sum not shifted back": ("score", "+ shift, float", ", float"),
    "kv_write: keys in place of values": ("kv_write", "tl.load(value + source", "tl.load(key + source"),
}


Change = Callable[[str, str, str], ModuleType]


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """From an op's name to its implementation with a part of the source replaced wherever it stands."""
    return lambda op, sound, broken: changed_module(op, sound, broken, tmp_path, monkeypatch)


def changed_module(op: str, sound: str, broken: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    source = Path(str(implementation(op, "triton").__file__)).read_text()
    assert sound in source
    path = folder / "impl_changed.py"
    path.write_text(source.replace(sound, broken))
    found = importlib.util.spec_from_file_location(f"{op}_changed", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    patch.setitem(sys.modules, found.name, module)
    found.loader.exec_module(module)
    if hasattr(module, "SEGMENT"):
        module.SEGMENT = SEGMENT
    return module


def complaint(op: str, module: ModuleType, cases: int) -> str | None:
    """What the comparison says about the first case of `op` that fails; None when none does."""
    contract: OpSpec = spec(op)
    ends = {**contract.dims, **LONGER.get(op, {})}
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        dims = {name: int(rng.integers(low, high + 1)) for name, (low, high) in ends.items()}
        case = contract.make_case(rng, dims)
        mode = (FLOAT32, BFLOAT16)[seed % 2]
        try:
            with np.errstate(all="ignore"):  # of broken kernels in the interpreter
                check(contract, case, BACKEND, mode, table=BACKEND.table(mode, {op: module}))
        except KernelMismatchError as error:
            return str(error)
    return None


@pytest.mark.parametrize(("op", "sound", "broken"), FAULTS.values(), ids=FAULTS)
def test_a_broken_kernel_is_found(op: str, sound: str, broken: str, changed: Change) -> None:
    assert complaint(op, changed(op, sound, broken), cases=60) is not None


@pytest.mark.parametrize("op", sorted({op for op, _, _ in FAULTS.values()}))
def test_a_sound_kernel_is_not_accused(op: str, changed: Change) -> None:
    assert complaint(op, changed(op, "", ""), cases=8) is None
