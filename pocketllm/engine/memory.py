"""How much memory the caches may take, and how many blocks and state slots and which window that gives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pocketllm import env
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError

MIB = 1024**2
GIB = 1024**3
_LEAST_RESERVE = 2 * GIB

SNAPSHOT_SHARE = 4
"""Of the memory beside the sequences' own states one part in so many goes to snapshots of states, within limits."""

LEAST_SNAPSHOTS = 4
"""In all."""

MOST_SNAPSHOTS = 32
"""For each sequence that may run."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the caches.

    Attributes:
        blocks: how many KV blocks there are.
        max_model_len: the context window of one request; one such request always fits.
        shrunk_from: the window that did not fit, or None.
        states: how many slots of recurrent states there are; 0 for a model without them.
    """

    blocks: int
    max_model_len: int
    shrunk_from: int | None = None
    states: int = 0


def plan_cache(
    args: EngineArgs, *, context_length: int, bytes_per_block: int, bytes_per_state: int = 0, available: int
) -> CachePlan:
    """Blocks for every sequence's whole window if the memory allows, else as many as it does.

    A model with recurrent states gets slots first: one for each sequence that may run, and some for snapshots.

    Args:
        args: the engine's arguments.
        context_length: tokens that the model was made for.
        bytes_per_block: memory of one block.
        bytes_per_state: memory of one slot of recurrent states; 0 where the model has none.
        available: bytes that the caches may take.

    Raises:
        ConfigurationError: a window that was asked for, or the least useful one, does not fit.
    """
    window = args.max_model_len or context_length
    states = _state_slots(args, bytes_per_state, available)
    state_bytes = states * bytes_per_state
    affordable = max(available - state_bytes, 0) // max(bytes_per_block, 1)
    per_sequence = -(-window // args.block_size)
    if affordable >= per_sequence:
        return CachePlan(min(affordable, per_sequence * args.max_num_seqs), window, states=states)
    if args.max_model_len is not None or affordable < 1:
        smaller = "max_num_seqs" if state_bytes > per_sequence * bytes_per_block else "max_model_len"
        beside = f" beside {state_bytes / MIB:.1f} MiB of recurrent states" if states else ""
        raise ConfigurationError(
            f"a context window of {window} tokens needs {per_sequence * bytes_per_block / MIB:.1f} MiB of KV cache"
            f"{beside} and {available / MIB:.1f} MiB are available: lower {smaller}, raise kv_cache_mib or free memory"
        )
    return CachePlan(affordable, affordable * args.block_size, shrunk_from=window, states=states)


def _state_slots(args: EngineArgs, bytes_per_state: int, available: int) -> int:
    """Slots of recurrent states: for the sequences that run, and for as many snapshots as their share holds."""
    if bytes_per_state == 0:
        return 0
    if not args.prefix_cache:
        return args.max_num_seqs
    own = args.max_num_seqs
    snapshots = (available - own * bytes_per_state) // SNAPSHOT_SHARE // bytes_per_state
    return own + min(max(snapshots, LEAST_SNAPSHOTS), MOST_SNAPSHOTS * own)


def cache_budget(args: EngineArgs, device_memory: tuple[int, int] | None) -> int:
    """Bytes for the KV cache: what was asked for, as far as it is free, else what is free less the reserve.

    Args:
        args: the engine's arguments.
        device_memory: total and free bytes where the cache will lie; None is this host.
    """
    total, free = device_memory or host_memory()
    if args.kv_cache_mib is not None:
        return min(args.kv_cache_mib * MIB, free)
    reserve = env.MEMORY_RESERVE_GIB.read()
    kept = max(total // 10, _LEAST_RESERVE) if reserve is None else int(reserve * GIB)
    return max(free - kept, 0)


def host_memory() -> tuple[int, int]:
    """Total and free bytes of this host, or of the control group that confines this process."""
    file = Path("/proc/meminfo")
    if not file.exists():
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size, pages * size // 2  # what is free is not told; half of it is a guess on the safe side
    fields = dict(line.split(":", 1) for line in file.read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in _control_groups():
        if limit < total:
            total = limit
        free = min(free, max(limit - used, 0))
    return total, free


def _control_groups(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """Limit and use of this process's memory control group and of those around it, where they set a limit.

    Cached file pages that the kernel would give up first do not count as used: a model file that was just read would
    fill the group.
    """
    if not own.exists():
        return []
    found = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = _VERSION_2 if controllers == "" else _VERSION_1
        group = root / controllers / path.lstrip("/")
        # A container sees its own group as the root, whatever its path is called outside.
        for folder in {*([group, *group.parents] if group.is_dir() else []), root / controllers}:
            reading = _read_group(folder, *names)
            if reading is not None:
                found.append(reading)
    return found


_VERSION_2 = ("memory.max", "memory.current")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _read_group(folder: Path, limit_name: str, used_name: str) -> tuple[int, int] | None:
    limit_file, used_file, parts = folder / limit_name, folder / used_name, folder / "memory.stat"
    if not (limit_file.is_file() and used_file.is_file()):
        return None
    limit = limit_file.read_text().strip()
    if not limit.isdigit():
        return None
    fields = dict(line.split() for line in parts.read_text().splitlines()) if parts.is_file() else {}
    idle = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return int(limit), max(int(used_file.read_text()) - idle, 0)
