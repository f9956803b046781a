"""Which backend runs a model: the order of `auto`, and what is said when one cannot."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.runtimes import registry
from pocketllm.runtimes.base import Runtime, RuntimeOptions
from pocketllm.runtimes.registry import Backend, select_backend
from tests.scripted import ScriptedConfig

CONFIG = ScriptedConfig(vocab_size=4)
ABSENT = "pocketllm_absent_package"


def options(device: str = "cpu") -> RuntimeOptions:
    return RuntimeOptions(device=device, dtype="float32", block_size=4)


class Shelf:
    """Backends of a test's own in the place of the real ones."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._module = ModuleType("shelf_of_runtimes")
        self._backends: dict[str, Backend] = {}
        self.asked: list[tuple[str, Any, RuntimeOptions]] = []
        patch.setitem(sys.modules, self._module.__name__, self._module)
        patch.setattr(registry, "BACKENDS", self._backends)

    def add(self, name: str, *lacks: str, requires: str = "numpy", serves_on: str = "") -> None:
        """A backend that lacks what is listed."""

        def supports(config: Any, options: RuntimeOptions) -> tuple[str, ...]:
            self.asked.append((name, config, options))
            return lacks

        setattr(self._module, name, type(name, (), {"supports": staticmethod(supports)}))
        backend = Backend(name, self._module.__name__, name, requires, f"{name}-extra", serves_on=serves_on)
        self._backends[name] = backend


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    return Shelf(monkeypatch)


def test_auto_takes_the_first_that_can(shelf: Shelf) -> None:
    shelf.add("quick")
    shelf.add("slow")
    selection = select_backend("auto", CONFIG, options())
    assert selection.backend.name == "quick"
    assert selection.reason == "first in order of preference among those that can run this model here"
    assert shelf.asked == [("quick", CONFIG, options())]


def test_auto_tells_why_faster_ones_were_passed(shelf: Shelf) -> None:
    shelf.add("absent", requires=ABSENT)
    shelf.add("other", serves_on="cuda")
    shelf.add("weak", "no bfloat16", "no state caches")
    shelf.add("slow")
    shelf.add("slower")
    selection = select_backend("auto", CONFIG, options())
    assert selection.backend.name == "slow"
    assert selection.reason == (
        "first in order of preference among those that can run this model here "
        f"(absent: package '{ABSENT}' is not installed (pip install '.[absent-extra]' in the source tree); "
        "other: on cpu only when asked for by name; weak: no bfloat16, no state caches)"
    )
    assert [name for name, *_ in shelf.asked] == ["weak", "slow"]


def test_auto_takes_a_backend_on_the_device_that_it_is_made_for(shelf: Shelf) -> None:
    shelf.add("other", serves_on="cuda")
    shelf.add("slow")
    assert select_backend("auto", CONFIG, options("cuda:1")).backend.name == "other"
    assert select_backend("auto", CONFIG, options("cpu")).backend.name == "slow"


def test_auto_without_any_that_can_says_what_each_lacks(shelf: Shelf) -> None:
    shelf.add("weak", "no bfloat16")
    shelf.add("other", serves_on="cuda")
    with pytest.raises(UnsupportedFeatureError) as refused:
        select_backend("auto", CONFIG, options())
    assert str(refused.value) == (
        "no backend can run this model: weak: no bfloat16; other: on cpu only when asked for by name"
    )


def test_asked_for_by_name(shelf: Shelf) -> None:
    shelf.add("quick")
    shelf.add("slow", serves_on="cuda")
    selection = select_backend("slow", CONFIG, options())
    assert (selection.backend.name, selection.reason) == ("slow", "asked for by name")
    assert [name for name, *_ in shelf.asked] == ["slow"]


def test_one_that_was_asked_for_is_not_replaced(shelf: Shelf) -> None:
    shelf.add("quick")
    shelf.add("weak", "no bfloat16", "no state caches")
    shelf.add("weaker", "no cpu")
    shelf.add("slow", serves_on="cuda")
    with pytest.raises(UnsupportedFeatureError) as refused:
        select_backend("weak", CONFIG, options())
    assert str(refused.value) == (
        "backend 'weak' cannot run this model: no bfloat16; no state caches (backends that can: quick, slow)"
    )


def test_a_missing_package_is_named_and_nothing_is_imported(shelf: Shelf) -> None:
    shelf.add("absent", requires=ABSENT)
    with pytest.raises(UnsupportedFeatureError) as refused:
        select_backend("absent", CONFIG, options())
    assert str(refused.value) == (
        f"backend 'absent' cannot run this model: package '{ABSENT}' is not installed "
        "(pip install '.[absent-extra]' in the source tree) (backends that can: none)"
    )
    assert not shelf.asked


def test_an_unknown_name_is_told_the_known_ones(shelf: Shelf) -> None:
    shelf.add("quick")
    shelf.add("slow")
    with pytest.raises(UnsupportedFeatureError, match=r"^there is no backend 'abacus' here; there are: quick, slow$"):
        select_backend("abacus", CONFIG, options())


def test_the_fastest_come_first() -> None:
    assert list(registry.BACKENDS) == ["triton", "numba", "torch", "cupy"]
    assert registry.BACKENDS["triton"].serves_on == "cuda"


@pytest.mark.parametrize("name", registry.BACKENDS)
def test_a_name_leads_to_the_runtime_of_that_name(name: str) -> None:
    runtime = registry.BACKENDS[name].load()
    assert issubclass(runtime, Runtime)
    assert runtime.name == name


def test_a_package_of_the_projects_own_names_no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Backend("own", "x", "X", ABSENT, None)
    monkeypatch.setattr(registry, "BACKENDS", {"own": own})
    with pytest.raises(UnsupportedFeatureError) as refused:
        select_backend("own", CONFIG, options())
    assert "None" not in str(refused.value)
