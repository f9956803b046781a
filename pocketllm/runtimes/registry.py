"""Which backends there are, and which one runs a checkpoint."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.models.family import ModelConfig
from pocketllm.runtimes.base import Runtime, RuntimeOptions


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend by name.

    Attributes:
        name: as it is asked for.
        module, runtime: where its `Runtime` is; importing it loads the array library.
        requires: the package it needs.
        extra: the extra of this project that installs the package; None where the project itself does.
        serves_on: beginning of the names of the devices that it is made for; on others it has to be asked for by name.
    """

    name: str
    module: str
    runtime: str
    requires: str
    extra: str | None
    serves_on: str = ""

    @property
    def installed(self) -> bool:
        """Whether its package is there; nothing is imported."""
        return importlib.util.find_spec(self.requires) is not None

    def load(self) -> type[Runtime]:
        """Its runtime class."""
        return cast("type[Runtime]", getattr(importlib.import_module(self.module), self.runtime))


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("triton", "pocketllm.runtimes.triton_runtime", "TritonRuntime", "triton", "cuda", serves_on="cuda"),
        Backend("numba", "pocketllm.runtimes.numba_runtime", "NumbaRuntime", "numba", None),
        Backend("torch", "pocketllm.runtimes.torch_runtime", "TorchRuntime", "torch", "torch"),
        # On a CPU it does without CuPy; on a GPU it says itself that it is missing.
        Backend("cupy", "pocketllm.runtimes.cupy_runtime", "CupyRuntime", "numpy", None, serves_on="cuda"),
    )
}
"""By name, the fastest first: `auto` takes the first that can run the model on its device."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A backend that was chosen, and why."""

    backend: Backend
    reason: str


def select_backend(name: str, config: ModelConfig, options: RuntimeOptions) -> Selection:
    """The backend for a model.

    Raises:
        UnsupportedFeatureError: the backend asked for cannot run it, or none can; the message says what each lacks.
    """
    if name == "auto":
        return _first_that_can(config, options)
    backend = BACKENDS.get(name)
    if backend is None:
        raise UnsupportedFeatureError(f"there is no backend {name!r} here; there are: {', '.join(BACKENDS)}")
    reasons = _lacks(backend, config, options)
    if reasons:
        others = (other for other in BACKENDS.values() if other is not backend)
        able = [other.name for other in others if not _lacks(other, config, options)]
        raise UnsupportedFeatureError(
            f"backend {name!r} cannot run this model: {'; '.join(reasons)} "
            f"(backends that can: {', '.join(able) or 'none'})"
        )
    return Selection(backend, "asked for by name")


def _first_that_can(config: ModelConfig, options: RuntimeOptions) -> Selection:
    passed: list[str] = []
    for backend in BACKENDS.values():
        if not options.device.startswith(backend.serves_on):
            passed.append(f"{backend.name}: on {options.device} only when asked for by name")
            continue
        reasons = _lacks(backend, config, options)
        if not reasons:
            why = "first in order of preference among those that can run this model here"
            return Selection(backend, why + (f" ({'; '.join(passed)})" if passed else ""))
        passed.append(f"{backend.name}: {', '.join(reasons)}")
    raise UnsupportedFeatureError(f"no backend can run this model: {'; '.join(passed)}")


def _lacks(backend: Backend, config: ModelConfig, options: RuntimeOptions) -> tuple[str, ...]:
    if not backend.installed:
        what = "." if backend.extra is None else f".[{backend.extra}]"
        return (f"package {backend.requires!r} is not installed (pip install '{what}' in the source tree)",)
    return backend.load().supports(config, options)
