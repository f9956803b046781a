"""Linear layer in PyTorch."""

from __future__ import annotations

import torch

from pocketllm.kernels.contract import BoundOp, OpCall


def supports(call: OpCall) -> str | None:
    """Every floating-point weight is served; PyTorch runtimes expand the other formats when they load."""
    weight = call.weights["weight"]
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        return "the weight is not a floating-point tensor"
    return None


def bind(call: OpCall) -> BoundOp:
    """Weight and bias in the activation dtype, without a copy where they have it already."""
    dtype: torch.dtype = getattr(torch, call.dtype)
    weight: torch.Tensor = call.weights["weight"].to(dtype).t()
    if "bias" not in call.weights:

        def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return torch.mm(x, weight, out=out)

        return linear
    bias: torch.Tensor = call.weights["bias"].to(dtype)

    def linear_with_bias(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.addmm(bias, x, weight, out=out)

    return linear_with_bias
