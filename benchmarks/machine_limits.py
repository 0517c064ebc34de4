"""The machine's limits, measured now: memory read bandwidth, and the peaks of int8, bf16 and f32 products."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np

PEAKS = ("int8_peak", "bf16_peak", "f32_peak", "amx_int8_peak", "amx_bf16_peak")
_SOURCE = Path(__file__).with_name("machine_limits.cpp")


class MachineLimits:
    """Needs a C++ compiler (``c++``). Each method takes well under a second."""

    def __init__(self, threads: int, read_bytes: int = 1 << 30) -> None:
        self._threads = threads
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "limits.so"
            command = ["c++", "-std=c++17", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC", "-pthread"]
            subprocess.run([*command, str(_SOURCE), "-o", str(library)], check=True)
            self._native = ctypes.CDLL(str(library))
        for name in ("read_bandwidth", *PEAKS):
            getattr(self._native, name).restype = ctypes.c_double
        # Larger than any cache; written, or every page would be the same one of zeros.
        self._memory = np.ones(read_bytes // 8 + 8, np.int64)

    def read_bandwidth(self) -> float:
        """Bytes a second, all threads together: the faster of two ways of one pass over the memory."""
        start = -(-self._memory.ctypes.data // 64) * 64
        size = ctypes.c_size_t(self._memory.nbytes - 64)
        return float(self._native.read_bandwidth(ctypes.c_void_p(start), size, self._threads))

    def int8_peak(self) -> float:
        """Operations a second of vpdpbusd or, without it, of vpmaddubsw, two a multiply-add; 0 where the machine has neither."""
        return float(self._native.int8_peak(self._threads))

    def bf16_peak(self) -> float:
        """Operations a second of vdpbf16ps, two a multiply-add; 0 where the machine has none."""
        return float(self._native.bf16_peak(self._threads))

    def f32_peak(self) -> float:
        """Operations a second of f32 multiply-adds of 512 or 256 bits, two each; 0 where the machine has neither."""
        return float(self._native.f32_peak(self._threads))

    def amx_int8_peak(self) -> float:
        """Operations a second of tdpbusd on AMX tiles; 0 where the machine or its kernel gives none."""
        return float(self._native.amx_int8_peak(self._threads))

    def amx_bf16_peak(self) -> float:
        """Operations a second of tdpbf16ps on AMX tiles; 0 where the machine or its kernel gives none."""
        return float(self._native.amx_bf16_peak(self._threads))
