"""Two kernels for numbers of E4M3. To be loaded where TRITON_INTERPRET is set already."""

import triton
import triton.language as tl

from engine_cuda.kernels.common import from_e4m3, to_e4m3


@triton.jit
def narrow(x, y, BLOCK: tl.constexpr):
    """f32 to bytes."""
    place = tl.arange(0, BLOCK)
    tl.store(y + place, to_e4m3(tl.load(x + place)))


@triton.jit
def widen(x, y, NATIVE: tl.constexpr):
    """256 bytes to f32."""
    place = tl.arange(0, 256)
    tl.store(y + place, from_e4m3(tl.load(x + place), tl.float32, NATIVE))
