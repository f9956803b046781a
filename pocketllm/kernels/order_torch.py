"""The order of candidates in PyTorch: falling values, equal ones by index."""

from __future__ import annotations

import torch


def largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices (int64), both [R, count], of the first `count` numbers of each row of `x` [R, V].

    Where a row has fewer numbers above -inf, the rest has value -inf and an unspecified index.
    """
    if count == 0 or x.shape[0] == 0:
        return x.new_empty(x.shape[0], count), torch.empty(x.shape[0], count, dtype=torch.int64, device=x.device)
    if 2 * count > x.shape[1]:  # about where sorting everything is faster
        values, ids = x.sort(dim=1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    values, ids = x.topk(count)
    # topk takes any of the equal numbers at the cut, so take all of them first, then the ones with the lowest index.
    last = values[:, -1:]
    reach = int(((x >= last) & (last > -torch.inf)).sum(dim=1).max())
    if reach > count:
        values, ids = x.topk(reach)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values[:, :count], ids.gather(1, order)[:, :count]
