"""Where linear layers over quantised weights are told from the others: a table of ops with this class in front.

Models bind ``linear`` whatever the weight. On a table with `QuantizedLinears` before its own class a weight that is
block-quantised binds ``quantized_linear``; composites built on it follow.
"""

from __future__ import annotations

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Arrays, BoundOp, OpTable
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.registry import BackendOpTable, ReferenceOpTable


class QuantizedLinears(OpTable):
    """To be inherited before a table of ops."""

    def bind(self, op: str, weights: Arrays | None = None, **scalars: object) -> BoundOp:
        """See `OpTable.bind`."""
        weight = (weights or {}).get("weight")
        if op == "linear" and isinstance(weight, QuantTensor) and weight.format in FORMATS_WITH_CODES:
            op = "quantized_linear"
        return super().bind(op, weights, **scalars)  # type: ignore[safe-super]


class QuantizedOpTable(QuantizedLinears, BackendOpTable):
    """A backend's ops."""


class QuantizedReferenceOpTable(QuantizedLinears, ReferenceOpTable):
    """The references."""
