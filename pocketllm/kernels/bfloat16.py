"""bfloat16 for libraries that do not have it: numbers as the 16 bits that hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def to_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Numbers rounded to bfloat16, half to even; NaN stays NaN."""
    wide = np.asarray(values, dtype=np.float32, order="C")
    bits = wide.view(np.uint32)
    with np.errstate(over="ignore"):  # of NaN with all bits set, which is replaced
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    quiet = bits | np.uint32(0x400000)
    return (np.where(np.isnan(wide), quiet, rounded) >> np.uint32(16)).astype(np.uint16)


def from_bits(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """The numbers behind such bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
