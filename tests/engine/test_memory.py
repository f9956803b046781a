"""How large the KV cache becomes: by what is asked for, what is free, and what confines the process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.config import EngineArgs
from pocketllm.engine import memory
from pocketllm.engine.memory import GIB, MIB, CachePlan, cache_budget, plan_cache
from pocketllm.errors import ConfigurationError

BLOCK = 1000
CONTEXT = 100
PER_SEQUENCE = 7  # blocks of 16 tokens for a window of 100


def planned(blocks: int, *, window: int | None = None, remainder: int = 0) -> CachePlan:
    """The plan for two sequences where so many whole blocks and some bytes more are available."""
    args = EngineArgs(max_model_len=window, max_num_seqs=2, block_size=16)
    available = blocks * BLOCK + remainder
    return plan_cache(args, context_length=CONTEXT, bytes_per_block=BLOCK, available=available)


def test_every_sequence_gets_its_whole_window_and_nothing_more() -> None:
    assert planned(1000) == CachePlan(2 * PER_SEQUENCE, CONTEXT)
    assert planned(2 * PER_SEQUENCE) == CachePlan(2 * PER_SEQUENCE, CONTEXT)
    assert planned(1000, window=33) == CachePlan(2 * 3, 33)


def test_with_less_one_whole_window_still_fits() -> None:
    assert planned(2 * PER_SEQUENCE - 1, remainder=BLOCK - 1) == CachePlan(2 * PER_SEQUENCE - 1, CONTEXT)
    assert planned(PER_SEQUENCE) == CachePlan(PER_SEQUENCE, CONTEXT)
    assert planned(3, window=33) == CachePlan(3, 33)


def test_the_models_own_window_shrinks_to_what_there_is() -> None:
    assert planned(PER_SEQUENCE - 1) == CachePlan(6, 96, shrunk_from=CONTEXT)
    assert planned(1, remainder=BLOCK - 1) == CachePlan(1, 16, shrunk_from=CONTEXT)


def test_a_window_that_was_asked_for_does_not_shrink() -> None:
    with pytest.raises(ConfigurationError, match="a context window of 33 tokens needs"):
        planned(2, window=33, remainder=BLOCK - 1)
    with pytest.raises(ConfigurationError, match="100 tokens"):
        planned(6, window=CONTEXT)


def test_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.0 MiB are available"):
        planned(0, remainder=BLOCK - 1)


STATE = 3000


def with_states(mebibytes: int, **kwargs) -> CachePlan:
    """The plan for a model with recurrent states and two sequences."""
    args = EngineArgs(max_num_seqs=2, block_size=16, **kwargs)
    return plan_cache(
        args, context_length=CONTEXT, bytes_per_block=BLOCK, bytes_per_state=STATE, available=mebibytes * MIB
    )


def test_a_quarter_of_what_the_sequences_own_states_leave_goes_to_snapshots_as_long_as_they_are_not_too_many() -> None:
    args = EngineArgs(max_num_seqs=2, block_size=16)

    def states(available: int) -> int:
        plan = plan_cache(
            args, context_length=CONTEXT, bytes_per_block=BLOCK, bytes_per_state=STATE, available=available
        )
        assert plan.blocks * BLOCK + plan.states * STATE <= available
        return plan.states

    assert states((2 + 4 * 10) * STATE) == 2 + 10
    assert states((2 + 4 * 10) * STATE - 1) == 2 + 9
    assert states(10**9) == 2 + 2 * 32
    assert states(6 * STATE + 7 * BLOCK) == 2 + 4
    assert states(6 * STATE + BLOCK) == 2 + 4


def test_states_come_before_blocks_and_the_message_tells_of_them() -> None:
    told = "beside 36.0 MiB of recurrent states and 36.0 MiB are available: lower max_num_seqs, raise"
    with pytest.raises(ConfigurationError, match=told):
        plan_cache(
            EngineArgs(max_num_seqs=2),
            context_length=CONTEXT,
            bytes_per_block=BLOCK,
            bytes_per_state=6 * MIB,
            available=36 * MIB,
        )


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    assert with_states(1).states == 2 + 64
    assert with_states(1, prefix_cache=False).states == 2
    assert planned(100).states == 0


def test_the_message_tells_what_is_needed_and_what_is_there() -> None:
    args = EngineArgs(max_model_len=64, block_size=16)
    told = "64 tokens needs 12.0 MiB of KV cache and 5.0 MiB are available: lower max_model_len, raise"
    with pytest.raises(ConfigurationError, match=told):
        plan_cache(args, context_length=CONTEXT, bytes_per_block=3 * MIB, available=5 * MIB)


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 64), st.integers(1, 10_000), st.integers(0, 10**6))
def test_a_plan_fits_and_serves_a_whole_window(
    context: int, sequences: int, block_size: int, block_bytes: int, available: int
) -> None:
    args = EngineArgs(max_num_seqs=sequences, block_size=block_size)
    try:
        plan = plan_cache(args, context_length=context, bytes_per_block=block_bytes, available=available)
    except ConfigurationError:
        assert available < block_bytes
        return
    assert plan.blocks * block_bytes <= available
    assert plan.max_model_len <= plan.blocks * block_size
    assert plan.max_model_len <= context
    assert plan.shrunk_from == (None if plan.max_model_len == context else context)


def test_memory_that_was_asked_for_needs_no_reserve_and_is_what_is_free_at_most() -> None:
    assert cache_budget(EngineArgs(kv_cache_mib=5), (GIB, GIB // 2)) == 5 * MIB
    assert cache_budget(EngineArgs(kv_cache_mib=5), (GIB, 5 * MIB)) == 5 * MIB
    assert cache_budget(EngineArgs(kv_cache_mib=5), (GIB, 3 * MIB)) == 3 * MIB


def test_a_tenth_is_left_free_and_at_least_two_gibibytes() -> None:
    assert cache_budget(EngineArgs(), (100 * GIB, 70 * GIB)) == 60 * GIB
    assert cache_budget(EngineArgs(), (8 * GIB, 7 * GIB)) == 5 * GIB
    assert cache_budget(EngineArgs(), (8 * GIB, GIB)) == 0


@pytest.mark.parametrize(("reserve", "budget"), [("0", 7 * GIB), ("0.5", 6.5 * GIB), ("3", 4 * GIB), ("9", 0)])
def test_the_reserve_can_be_set(reserve: str, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_MEMORY_RESERVE_GIB", reserve)
    assert cache_budget(EngineArgs(), (100 * GIB, 7 * GIB)) == budget


@pytest.mark.parametrize("reserve", ["-1", "much", "nan", "inf"])
def test_a_reserve_that_cannot_be_used_is_named(reserve: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_MEMORY_RESERVE_GIB", reserve)
    with pytest.raises(ConfigurationError, match="POCKETLLM_MEMORY_RESERVE_GIB"):
        cache_budget(EngineArgs(), (100 * GIB, 7 * GIB))


def test_without_a_device_of_its_own_the_cache_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: (8 * GIB, 7 * GIB))
    assert cache_budget(EngineArgs(), None) == 5 * GIB


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(64 * MIB, 24 * MIB)], (64 * MIB, 40 * MIB)),
        ([(64 * MIB, 24 * MIB), (48 * MIB, 1 * MIB), (96 * MIB, 90 * MIB)], (48 * MIB, 6 * MIB)),
        ([(64 * MIB, 80 * MIB)], (64 * MIB, 0)),
    ],
)
def test_the_tightest_group_confines_the_host(
    groups: list[tuple[int, int]], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_control_groups", lambda: groups)
    assert memory.host_memory() == expected


def test_a_limit_beyond_the_hosts_memory_leaves_the_host_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_control_groups", list)
    total, free = memory.host_memory()
    assert 0 < free <= total
    monkeypatch.setattr(memory, "_control_groups", lambda: [(2**62, 0)])
    assert memory.host_memory()[0] == total


class Groups:
    """Control groups in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "cgroup"
        self._root.mkdir()
        self._own = folder / "own"

    def write(self, path: str, **files: object) -> None:
        """A group's files; a double underscore stands for the dot."""
        group = self._root / path
        group.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (group / name.replace("__", ".")).write_text(f"{text}\n")

    def read(self, *own: str) -> list[tuple[int, int]]:
        """What is found where these lines say which groups the process is in."""
        self._own.write_text("".join(f"{line}\n" for line in own))
        return sorted(memory._control_groups(self._root, self._own))


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path)


def test_version_2_counts_every_group_around_the_process(groups: Groups) -> None:
    groups.write("outer", memory__max=900, memory__current=500)
    groups.write("outer/inner", memory__max=700, memory__current=300)
    groups.write("outer/inner/beside", memory__max=1, memory__current=1)
    groups.write("other", memory__max=1, memory__current=1)
    assert groups.read("0::/outer/inner") == [(700, 300), (900, 500)]


def test_version_2_without_a_limit(groups: Groups) -> None:
    groups.write("outer", memory__max=900, memory__current=500)
    groups.write("outer/inner", memory__max="max", memory__current=300)
    assert groups.read("0::/outer/inner") == [(900, 500)]


def test_version_1(groups: Groups) -> None:
    groups.write("memory/job", memory__limit_in_bytes=800, memory__usage_in_bytes=200)
    groups.write("cpu/job", memory__limit_in_bytes=1, memory__usage_in_bytes=1)
    assert groups.read("4:cpu:/job", "5:memory:/job", "6:name=systemd:/job") == [(800, 200)]


def test_the_versions_do_not_mix(groups: Groups) -> None:
    groups.write("memory/job", memory__max=800, memory__current=200)
    groups.write("job", memory__limit_in_bytes=700, memory__usage_in_bytes=100)
    assert groups.read("5:memory:/job", "0::/job") == []


def test_cached_file_pages_do_not_count(groups: Groups) -> None:
    groups.write("two", memory__max=900, memory__current=500, memory__stat="anon 90\ninactive_file 350\nfile 400")
    groups.write(
        "memory/one",
        memory__limit_in_bytes=800,
        memory__usage_in_bytes=500,
        memory__stat="inactive_file 10\ntotal_inactive_file 200",
    )
    assert groups.read("0::/two", "5:memory:/one") == [(800, 300), (900, 150)]


def test_use_is_never_below_zero(groups: Groups) -> None:
    groups.write("two", memory__max=900, memory__current=100, memory__stat="inactive_file 350")
    assert groups.read("0::/two") == [(900, 0)]


def test_a_container_sees_its_own_group_as_the_root(groups: Groups) -> None:
    groups.write("", memory__max=600, memory__current=100)
    groups.write("memory", memory__limit_in_bytes=500, memory__usage_in_bytes=50)
    assert groups.read("0::/docker/abc") == [(600, 100)]
    assert groups.read("5:memory:/docker/abc") == [(500, 50)]


def test_a_group_whose_use_is_not_told_says_nothing(groups: Groups) -> None:
    groups.write("two", memory__max=900)
    assert groups.read("0::/two") == []


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert memory._control_groups(tmp_path, tmp_path / "absent") == []
