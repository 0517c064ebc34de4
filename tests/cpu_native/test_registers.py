"""What the compiler made of the kernels' innermost loops."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from engine_cpu import _native

PRODUCT = re.compile(r"(vfmadd|vpdp|vdpbf|vpmaddwd|vpmaddubsw)")


pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not shutil.which("objdump"), reason="takes x86-64 code apart by objdump"
)


@pytest.fixture(scope="module")
def listing() -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", _native.__file__]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def innermost_loops(listing: str) -> Iterator[list[str]]:
    """The instructions between each backward jump and its target where no other jump or call lies between."""
    places: dict[int, int] = {}
    code: list[str] = []
    straight = 0  # where the code that holds no jump began
    for line in listing.splitlines():
        found = re.match(r"\s+([0-9a-f]+):\t(.*)", line)
        if not found:
            continue
        places[int(found[1], 16)] = len(code)
        code.append(found[2])
        jump = re.match(r"(j\w+|call|ret)\s*([0-9a-f]*)", found[2])
        if not jump:
            continue
        begin = places.get(int(jump[2], 16), -1) if jump[1] not in ("call", "ret") and jump[2] else -1
        if begin >= straight:
            yield code[begin:]
        straight = len(code)


def sums_in_memory(body: list[str]) -> int:
    """How many stack slots are read, and written with what a product was added to."""
    read, summed, written = set(), set(), set()
    for line in body:
        name, _, rest = line.partition(" ")
        operands = re.findall(r"[^,(]*\([^)]*\)|[^,]+", rest.strip())
        read.update(operand for operand in operands[:-1] if "(%rsp)" in operand or "(%rbp)" in operand)
        if "%" not in rest or not name.startswith("v"):
            continue
        if operands[-1] in read and operands[-2] in summed:
            written.add(operands[-1])
        (summed.add if PRODUCT.match(name) else summed.discard)(operands[-1])
    return len(written)


def test_no_loop_of_512_bits_keeps_its_sums_in_memory(listing: str) -> None:
    """g++ 12 kept each sum of values over an int8 cache on the stack, and the products took 1.5 times as long."""
    loops = 0
    for body in innermost_loops(listing):
        products = sum(bool(PRODUCT.match(line)) and "%zmm" in line for line in body)  # with registers for all
        loops += products >= 4
        assert products < 4 or sums_in_memory(body) < products / 2, "\n".join(body)
    assert loops > 100  # or nothing was looked at


def test_avx2_keeps_sums_of_bytes_in_its_16_registers(listing: str) -> None:
    """For sums of numbers of seven bits registers were kept that they do not need, so some of them lay on the stack."""
    loops = 0
    for body in innermost_loops(listing):
        products = sum("vpmaddubsw" in line and "%ymm" in line for line in body)
        loops += products >= 48
        assert products < 48 or sums_in_memory(body) < products / 20, "\n".join(body)
    assert loops > 50


def test_avx_vnni_has_dot_products_of_its_own(listing: str) -> None:
    """Without them it would be avx2 by another name, with the same bits."""
    for product in ("vpdpbusd", "vpdpwssd"):
        assert listing.count(f"{{vex}} {product}") > 100
