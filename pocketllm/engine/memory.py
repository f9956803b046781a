"""How much memory the KV cache may take, and how many blocks and which window that gives."""

from __future__ import annotations

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
    affordable = available // bytes_per_block
    per_sequence = -(-window // args.block_size)
    if affordable >= per_sequence:
        return CachePlan(min(affordable, per_sequence * args.max_num_seqs), window)
    if args.max_model_len is not None or affordable < 1:
        raise ConfigurationError(
            f"a context window of {window} tokens needs {per_sequence * bytes_per_block / MIB:.0f} MiB of KV cache and "
            f"{available / MIB:.0f} MiB are available: lower max_model_len, raise kv_cache_mib or free memory"
        )
    return CachePlan(affordable, affordable * args.block_size, shrunk_from=window)


def cache_budget(args: EngineArgs) -> int:
    """Bytes for the KV cache in host memory: what was asked for, else what is free less the reserve."""
    if args.kv_cache_mib is not None:
        return args.kv_cache_mib * MIB
    total, free = host_memory()
    reserve = env.MEMORY_RESERVE_GIB.read()
    kept = max(total // 10, _LEAST_RESERVE) if reserve is None else int(reserve * GIB)
    return max(free - kept, 0)


def host_memory() -> tuple[int, int]:
    """Total and free bytes of this host, or of the control group that confines this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit, used = _control_group()
    if limit is None or limit >= total:
        return total, free
    return limit, min(free, max(limit - used, 0))


def _control_group() -> tuple[int | None, int]:
    """Limit and use of this process's memory control group (version 2, then 1); no limit where none is set."""
    for limit_name, used_name in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit_file, used_file = Path(limit_name), Path(used_name)
        if limit_file.exists() and used_file.exists():
            limit = limit_file.read_text().strip()
            return (int(limit) if limit.isdigit() else None), int(used_file.read_text())
    return None, 0
