"""What the machine has, as the operating system tells it, whether or not a backend can use it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_DISPLAY, _ACCELERATOR = 0x03, 0x12  # base classes of PCI devices
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_X86 = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_int8", "amx_bf16")
_ARM = ("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme")


@dataclass(frozen=True)
class Advice:
    """A backend that would use what is here, and how to get it."""

    backend: str
    sentence: str


def processor() -> dict[str, str]:
    """What Linux tells of the first processor, by its names; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def instruction_sets() -> list[str]:
    """The processor's extensions that kernels may use, by Linux's names; none elsewhere."""
    told = processor()
    flags = told.get("flags", told.get("Features", "")).split()
    return [name for name in _X86 + _ARM if name in flags]


def accelerators(devices: Path = _PCI) -> list[str]:
    """Vendors of the display controllers and accelerators that are built in, each once for each device."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return ["Apple"]
    found = []
    for device in sorted(devices.glob("*")):
        try:
            kind, vendor = (int((device / name).read_text(), 16) for name in ("class", "vendor"))
        except (OSError, ValueError):
            continue
        if kind >> 16 in (_DISPLAY, _ACCELERATOR) and vendor in _VENDORS:
            found.append(_VENDORS[vendor])
    return found


_ADVICE = {
    "NVIDIA": Advice("cuda", "pip install 'engine[cuda]' brings torch and Triton for it"),
    "AMD": Advice("rocm", "install a torch built for ROCm, by AMD's instructions for this card"),
    "Apple": Advice("metal", "pip install 'engine[metal]' brings MLX for it"),
    "Intel": Advice("opencl", "install Intel's OpenCL driver, and the plugin engine-opencl"),
}


def advice(found: Sequence[str], usable: Sequence[str]) -> list[str]:
    """Sentences on what would use the accelerators that are here and that no usable backend is for."""
    sentences = []
    for vendor in dict.fromkeys(found):
        best = _ADVICE[vendor]
        if best.backend not in usable and not (vendor == "Intel" and len(set(found)) > 1):
            sentences.append(f"This machine has {'an' if vendor[0] in 'AIN' else 'a'} {vendor} GPU: {best.sentence}.")
    return sentences
