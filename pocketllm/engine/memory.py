"""How much memory the KV cache may take, and how many blocks and which window that gives."""

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


@dataclass(frozen=True, slots=True)
class CachePlan:
    """The size of the KV cache.

    Attributes:
        blocks: how many there are.
        max_model_len: the context window of one request; one such request always fits.
        shrunk_from: the window that did not fit, or None.
    """

    blocks: int
    max_model_len: int
    shrunk_from: int | None = None


def plan_cache(args: EngineArgs, *, context_length: int, bytes_per_block: int, available: int) -> CachePlan:
    """Blocks for every sequence's whole window if the memory allows, else as many as it does.

    Args:
        args: the engine's arguments.
        context_length: tokens that the model was made for.
        bytes_per_block: memory of one block.
        available: bytes that the cache may take.

    Raises:
        ConfigurationError: a window that was asked for, or the least useful one, does not fit.
    """
    window = args.max_model_len or context_length
    affordable = available // max(bytes_per_block, 1)
    per_sequence = -(-window // args.block_size)
    if affordable >= per_sequence:
        return CachePlan(min(affordable, per_sequence * args.max_num_seqs), window)
    if args.max_model_len is not None or affordable < 1:
        raise ConfigurationError(
            f"a context window of {window} tokens needs {per_sequence * bytes_per_block / MIB:.0f} MiB of KV cache and "
            f"{available / MIB:.0f} MiB are available: lower max_model_len, raise kv_cache_mib or free memory"
        )
    return CachePlan(affordable, affordable * args.block_size, shrunk_from=window)


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
