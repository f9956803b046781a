"""Arrays of the backend ``triton``: PyTorch's, on a GPU, or on the CPU through Triton's interpreter."""

from __future__ import annotations

import torch

from pocketllm.errors import UnsupportedFeatureError
from pocketllm.kernels.checking import arrays_torch
from pocketllm.kernels.jit.loading_triton import choose_compiler, choose_interpreter, loaded_as, will_load_as


class Adapter(arrays_torch.Adapter):
    """See `pocketllm.kernels.checking.arrays.Backend`."""

    name = "triton"

    def __init__(self, device: str | None = None) -> None:
        compiles = will_load_as() == "compiler" and torch.cuda.is_available()
        super().__init__(device or ("cuda" if compiles else "cpu"))
        if self.device != "cpu":
            choose_compiler()
        elif loaded_as() == "compiler":
            raise UnsupportedFeatureError(
                "on a CPU Triton's kernels run through its interpreter, and this process has imported it as a "
                "compiler: start anew with TRITON_INTERPRET=1 in the environment"
            )
        else:
            choose_interpreter()
            self.emulator = "Triton's interpreter"
