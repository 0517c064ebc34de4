"""How kernels are cut into programs, which differs from one generation of GPUs to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from .kernels.common import INTERPRETED, power_of_two


def architecture() -> str:
    """Such as sm_90 or gfx942: that of this thread's GPU, or nothing where there is none."""
    return _named(torch.cuda.current_device()) if _any_gpu() else ""


@cache
def _any_gpu() -> bool:
    return torch.cuda.is_available()


@cache
def _named(index: int) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def has_fp8() -> bool:
    """Whether there are instructions for E4M3 as the OCP has it: NVIDIA's, from Ada on."""
    return _nvidia() and int(architecture()[3:]) >= 89


def multiplies_fp8() -> bool:
    """Whether products of E4M3 are taken as such: on Hopper and later. The interpreter does, too."""
    return INTERPRETED or (has_fp8() and int(architecture()[3:]) >= 90)


def copies_tiles() -> bool:
    """Whether products are taken of tiles that the GPU's copy engine brings: NVIDIA's in data centres, from Hopper on. The
    interpreter does, too."""
    return INTERPRETED or architecture() in ("sm_90", "sm_100", "sm_103")


@cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if _any_gpu() else 132


def together() -> int:
    """How codes lie (``repack.packed_codes``): columns beside each other that a lane's operand has as Triton's
    compiler arranges it, which had four of them until 3.7; 0 where there are no instructions of NVIDIA's. The interpreter goes
    NVIDIA's way."""
    if not (INTERPRETED or _nvidia()):
        return 0
    major, minor = map(int, triton.__version__.split(".")[:2])
    return 4 if (major, minor) < (3, 8) else 2


def _nvidia() -> bool:
    return architecture().startswith("sm_")


def _amd() -> bool:
    return architecture().startswith("gfx")


def _rdna() -> bool:
    """AMD's GPUs with warps of 32, whose threads have no more than 256 registers."""
    return architecture().startswith(("gfx10", "gfx11", "gfx12"))


def _registers_hold_sums() -> bool:
    """Whether products take their sums from registers: on NVIDIA's GPUs before Hopper, and on consumers' after it."""
    return architecture().startswith(("sm_8", "sm_12"))


def _little_shared() -> bool:
    """NVIDIA's GPUs whose programs may share 99 KiB, and not 163 or more."""
    return architecture() in ("sm_86", "sm_89") or architecture().startswith("sm_12")


PROGRAMS = 128
"""About as many multiprocessors a large GPU of NVIDIA's has. With fewer programs some are idle."""
SHARED = 96 << 10
"""Bytes of memory for a program's steps: so that two are on a multiprocessor, or one where there is little. Where rows are few,
the memory's bandwidth takes some 30 KiB on their way to each multiprocessor at a time."""
ALONE = 128 << 10
"""The same for a program that has a multiprocessor to itself, since there are no more of them."""
TILED = 200 << 10
"""And for one whose tiles the copy engine brings, on GPUs that have so much."""
MOST_BROUGHT = 256
"""Numbers of a row that the copy engine brings at once."""
PART = 1024
"""The fewest columns of a part of a product."""
FEW = 32
"""Rows that count as few."""
FEW_OUTPUTS = 32
"""Outputs of the narrowest program of few rows with codes."""
FEW_STEP = 256
"""Columns of its longest step, of which parts have whole ones: the same for all that are few."""


@dataclass(frozen=True)
class Tiles:
    """Rows of x, rows of the weight and columns of a program's step, and warps and stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def most_registers(tiles: Tiles) -> dict[str, int]:
    """What a thread may have of few rows on NVIDIA's GPUs: by itself their assembler takes 64 and spills, for more programs than
    shared memory holds."""
    return {"maxnreg": 80} if tiles.bm == 16 and _nvidia() else {}


def of_matmul(
    rows: int, outputs: int, bytes_: int, block: int | None = None, codes: bool = False, columns: int | None = None
) -> Tiles:
    """``bytes_``: of a number in the product. ``block``: the rows of a program, where they are given. ``codes``: whether the
    weight is decoded in registers. ``columns``: of a step, where they are given; fewer are read further ahead."""
    if INTERPRETED:  # each program costs the same, however large it is
        bm = block or power_of_two(min(rows, 64), 16)
        return Tiles(bm, power_of_two(min(outputs, 256), 32 if codes else 16), 128, 4, 1)
    most = _most_rows(bytes_, codes)
    bm = block or power_of_two(min(rows, most), 16)
    bn = 64 if bm <= 32 and not (codes and bm == most) else 128
    if codes and bytes_ == 4:  # 64 columns, as 32 bytes of codes may hold; there are registers for as few rows
        return Tiles(bm, 64 if _nvidia() and not _registers_hold_sums() else 32, 64, 4, 2)
    if _nvidia() and bytes_ < 4:
        return _busy(rows, outputs, bytes_, codes, bm, bn, columns, block is not None)
    warps = 8 if bm >= min(most, 128) and bn == 128 else 4
    return Tiles(bm, bn, 128 // bytes_, warps, 2 if codes else 3)


def _busy(
    rows: int, outputs: int, bytes_: int, codes: bool, bm: int, bn: int, given: int | None, grouped: bool
) -> Tiles:
    """Tiles of ``bn`` outputs or fewer, so that all multiprocessors have some; few rows are read in large steps. Narrow tiles are
    multiplied by other instructions, which give E4M3 other bits."""
    few = bm <= 32
    least, wanted = (32, 2 * PROGRAMS) if few and not codes and given is None else (64, PROGRAMS)
    blocks = -(-rows // bm)
    while bn > least and blocks * -(-outputs // bn) < wanted:
        bn //= 2
    alone = blocks * -(-outputs // bn) <= PROGRAMS and not (grouped or _little_shared())
    shared = ALONE if alone else SHARED
    warps = 8 if bm >= 128 and not (codes and bn == 64) else 4  # of more, some would decode what others do
    one = bm * bytes_ + bn * (1 if codes else bytes_)
    if given is not None:
        return Tiles(bm, bn, given, warps, min(8, shared // (one * given)))
    columns = (128 if codes else 512 // bytes_) if few else (256 if bm == 64 else 128) // bytes_
    while 3 * one * columns > SHARED:
        columns //= 2
    return Tiles(bm, bn, columns, warps, min(4, shared // (one * columns)))


def of_tiled(rows: int, outputs: int, bytes_: int, whole: bool) -> Tiles:
    """Of tiles that the copy engine brings. Few rows want much of the weight on its way, many the largest tile of which all
    multiprocessors have one, but whole numbers two programs on each, of which one multiplies while the other waits for its
    products. Outputs are 64 or more, since narrower ones are multiplied by other instructions, which may give sums other bits."""
    if INTERPRETED:
        return Tiles(power_of_two(min(rows, 64), 16), power_of_two(min(outputs, 256), 64), 128, 4, 1)
    bm = power_of_two(min(rows, 128), 16)
    if bm <= 64:
        alone = -(-outputs // 64) <= PROGRAMS
        step = min((512 if alone and bm == 16 else 256) // bytes_, MOST_BROUGHT)
        return _deep(Tiles(bm, 64, step, 4, 1), bytes_, TILED if alone else SHARED)
    shapes = ((128, 128), (128, 64)) if whole else ((256, 128), (128, 128), (128, 64))
    bm, bn = next((s for s in shapes if -(-rows // s[0]) * -(-outputs // s[1]) >= PROGRAMS * 3 // 4), shapes[-1])
    usual = Tiles(bm, bn, 128 // bytes_, 8 if bm == 256 else 4, 1)
    return _deep(usual, bytes_, TILED if bm == 256 else SHARED)


def _deep(tiles: Tiles, bytes_: int, shared: int) -> Tiles:
    """With as many stages as there is memory for."""
    return replace(tiles, stages=max(2, min(8, shared // stage_bytes(tiles, bytes_))))


def stage_bytes(tiles: Tiles, bytes_: int) -> int:
    return (tiles.bm + tiles.bn) * tiles.bk * bytes_


def programs(tiles: Tiles, rows: int, outputs: int, bytes_: int) -> int:
    """One a tile, or where each has a multiprocessor to itself no more than there are of these."""
    count = -(-rows // tiles.bm) * -(-outputs // tiles.bn)
    if INTERPRETED:
        return min(count, 3)
    alone = tiles.stages * stage_bytes(tiles, bytes_) > SHARED
    return min(count, _multiprocessors()) if alone else count


def near_tiled(usual: Tiles, rows: int, bytes_: int) -> list[Tiles]:
    """The usual tiles, and others worth a try, each as deep as one or two programs of a multiprocessor may be."""
    most = power_of_two(min(rows, 256), 16)
    found = [
        _deep(Tiles(bm, bn, usual.bk, warps, 1), bytes_, shared)
        for bm in (16, 32, 64, 128, 256) for bn in (64, 128, 256) for warps in (4, 8) for shared in (SHARED, TILED)
        if most // 4 <= bm <= most and warps * 32 * 8 <= bm * bn <= warps * 32 * 128
    ]  # fmt: skip
    return [usual, *(tiles for tiles in dict.fromkeys(found) if tiles != usual)]


def of_few(rows: int, outputs: int, group: int, block: int | None = None) -> Tiles:
    """Of few rows with codes, groups of 16 or of more. Each of the warps has groups of columns of its own, and all the
    program's outputs; of a few rows it has two at a time, since many narrow programs wait less for each other's warps."""
    bm = block or power_of_two(min(rows, FEW), 8)
    if INTERPRETED:
        return Tiles(bm, power_of_two(min(outputs, 256), 32), FEW_STEP if group > 16 and bm == 8 else 128, 4, 1)
    if group == 16:
        return Tiles(bm, FEW_OUTPUTS, 128, 4, 4)
    return Tiles(bm, FEW_OUTPUTS, FEW_STEP, 4, 4) if bm == 8 else Tiles(bm, 2 * FEW_OUTPUTS, 128, 4, 4)


def parts_of(width: int, rows: int, outputs: int, depth: int) -> int:
    """In how many parts the columns of codes are multiplied by programs of their own, of ``width`` outputs: few rows, or decoding
    would wait for itself on multiprocessors that have a warp or two. The same for few rows of any number, which have the same
    bits therefore."""
    parts, programs = 1, -(-outputs // width)
    if rows <= FEW:
        while parts < 8 and programs * parts < 3 * PROGRAMS and depth >= 2 * parts * PART:
            parts *= 2
    return parts


def _most_rows(bytes_: int, codes: bool) -> int:
    """For which registers suffice; RDNA's multiply f32 without the matrix units."""
    most = 64 if _rdna() else 128
    if bytes_ == 4:
        most = 32 if _rdna() else 64 if _registers_hold_sums() else 128
    return most // 2 if codes and (bytes_ == 4 or _rdna()) else most


def near_few(usual: Tiles, group: int) -> list[Tiles]:
    """The usual tiles, and others worth a try; their sums have the same order. A step has fewer factors than would fill a
    thread's read each."""
    found = [
        replace(usual, bn=bn, bk=bk, stages=stages)
        for bn in (32, 64) for bk in (128, FEW_STEP) for stages in (2, 3, 4, 5, 6)
        if bn * bk < 512 * min(group, 32) and bn * usual.bm <= 2048
    ]  # fmt: skip
    return [usual, *(tiles for tiles in found if tiles != usual)]


def near(usual: Tiles, rows: int, block: int | None) -> list[Tiles]:
    """The usual tiles, and others worth a try for so many rows. A step's columns stay, and with them the order of sums. A thread
    has no more than 128 sums, as the rest of its registers are for operands; of eight warps each has 16 at least, or more of
    them would only wait. Tiles larger than the usual have as many stages or one fewer, smaller ones as many or one more."""
    size = usual.bm * usual.bn
    most = power_of_two(min(rows, 256), 16)
    heights = [block] if block else [bm for bm in (16, 32, 64, 128, 256) if most // 4 <= bm <= most]
    found = [
        Tiles(bm, bn, usual.bk, warps, stages)
        for bm in heights for bn in (32, 64, 128, 256) for warps in (4, 8) for stages in range(2, max(5, usual.stages + 1))
        if warps * 32 * (4 if warps == 4 else 16) <= bm * bn <= warps * 32 * 128
        if -(bm * bn >= size) <= stages - max(usual.stages, 2) <= (bm * bn <= size)
    ]  # fmt: skip
    return [usual, *(tiles for tiles in found if tiles != usual)]


@dataclass(frozen=True)
class AttentionTiles:
    """A program's tokens, rows for query heads of each, and cached tokens a step; ``chunks`` programs share a group of heads.
    ``piece``: columns of a product of queries and keys, 0 for all of them."""

    tokens: int
    group_rows: int
    chunks: int
    bn: int
    warps: int
    stages: int
    piece: int

    def meta(self) -> dict[str, int]:
        return {
            "BQ": self.tokens, "GROUP_ROWS": self.group_rows, "CHUNKS": self.chunks, "BN": self.bn, "PIECE": self.piece,
            "AHEAD": self.stages > 2, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def of_attention(group: int, width: int, bytes_: int, scaled: bool) -> tuple[AttentionTiles, AttentionTiles]:
    """For sequences with one token, and for more: values of ``width``, ``bytes_`` of a number in the products. ``scaled``:
    whether the cache has scales."""
    large, wide = width * bytes_ > 256, width * bytes_ > 512
    bn = (16 if large and _amd() else 32) if large or _rdna() else 64
    warps = 8 if large else 4
    stages = 1 if wide or _rdna() else 2
    deep = 3 if stages == 2 and bytes_ == 2 and _nvidia() and not _little_shared() else stages
    most = 32 if wide or bytes_ == 4 or _rdna() else 64
    if _amd() and (wide or (bytes_ == 4 and _rdna())):
        most = 16
    if wide and _nvidia():
        bn = 16 if bytes_ == 4 or _little_shared() else bn
        most = 16 if bytes_ == 4 else most
    rows = power_of_two(min(group, most))
    chunks = -(-group // rows)
    # Each warp has all queries of a product in its registers, and of f32 in several parts.
    piece = 64 if width * bytes_ > 1024 or (wide and _rdna()) else 0
    # With fewer cached tokens a step a multiprocessor has another program of one query.
    short = bn // 2 if deep > 2 and bn == 64 and width * bytes_ > 128 else bn
    few = AttentionTiles(
        1, max(rows, 16), chunks, short, 2 if width * bytes_ <= 128 and not _rdna() else warps, deep, piece
    )
    # Of registers four warps have too few for the sums of 64 rows of 128 columns.
    warps = 8 if _registers_hold_sums() else warps
    many = AttentionTiles(most // rows, rows, chunks, bn, warps, stages if scaled else deep, piece)
    return few, many


def dot_type(x: torch.dtype, weight: torch.dtype | None) -> tuple[tl.dtype, str]:
    """In what a product with a weight stored as ``weight`` (None: as codes) is taken, and how precisely.

    16-bit numbers of one type as they are; codes in the type of x; anything else as f32, in one pass of TF32 where x has 16
    bits, since TF32 holds these, or in three that together lose nothing.
    """
    if INTERPRETED:
        return tl.float32, "ieee"
    if x == torch.float32:
        return tl.float32, precise()
    if weight is None or weight == x:
        return (tl.bfloat16 if x == torch.bfloat16 else tl.float16), "ieee"
    return tl.float32, precise() if _amd() else "tf32"


WORDS = {"num_warps": 1, "num_stages": 2, "maxnreg": 128}
"""How attention by words is compiled: so that a multiprocessor has sixteen programs, each of which reads a step ahead."""


def precise() -> str:
    """How products of f32 numbers are taken where they must come near to f32: AMD's units have no TF32."""
    return "ieee" if _amd() else "tf32x3"
