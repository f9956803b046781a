"""Where linear layers over quantised weights are told from the others: a table of ops with this class in front.

Models bind ``linear`` whatever the weight. On a table with `QuantizedLinears` before its own class a weight that is
block-quantised binds ``quantized_linear``; composites built on it follow.
"""

from __future__ import annotations

from pocketllm.checkpoint.quant import QuantTensor
from pocketllm.kernels.contract import Arrays
from pocketllm.kernels.quantized_linear.codes import FORMATS_WITH_CODES
from pocketllm.kernels.registry import BackendOpTable, ReferenceOpTable


class QuantizedLinears:
    """To be inherited before a table of ops."""

    def resolve(self, op: str, weights: Arrays) -> str:
        """See `BackendOpTable.resolve`."""
        weight = weights.get("weight")
        quantised = isinstance(weight, QuantTensor) and weight.format in FORMATS_WITH_CODES
        return "quantized_linear" if op == "linear" and quantised else op


class QuantizedOpTable(QuantizedLinears, BackendOpTable):
    """A backend's ops."""


class QuantizedReferenceOpTable(QuantizedLinears, ReferenceOpTable):
    """The references."""
