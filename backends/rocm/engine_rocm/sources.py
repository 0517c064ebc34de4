"""The kernels in HIP C++ and what each is compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine_cuda.repack import Form

FOLDER = Path(__file__).with_name("hip")
HEADER = "portable.h"
Options = Mapping[str, str | int]
"""Macros of the preprocessor."""

SPLIT = 512
"""Cached tokens of a part, as in the CUDA backend."""
MOST_HEADS = 4
"""Query heads of a workgroup, at most: so many threads keep in registers."""
MOST_ROWS = 4
"""Rows of x that a product takes at once, at most."""
OUTPUTS = 4
"""Rows of a matrix that a workgroup has."""
THREADS = {"attend_decode": 128, "merge_parts": 128, "gemv": 128, "norm_quantize": 256}
_WIDTHS = (16, 32, 64, 128, 256)


def text(name: str) -> str:
    """A file's text."""
    return (FOLDER / name).read_text()


def attention(width: int, group: int, block_size: int, act: str, kv: str, split: int = SPLIT) -> Options:
    """Of ``attention.hip``, for heads of ``width`` and ``group`` query heads a KV head; storage tags of q and of the cache.
    ValueError where ``refusal`` has a sentence."""
    if why := refusal(width):
        raise ValueError(why)
    heads = min(MOST_HEADS, 1 << (group - 1).bit_length())
    padded = next(size for size in _WIDTHS if size >= width)
    return {
        "WIDTH": padded, "HEADS": heads, "BLOCK_SIZE": block_size, "SPLIT": split, "ACT": act, "KV": _c_type(kv),
    }  # fmt: skip


def refusal(width: int) -> str | None:
    """Why the attention kernel does not take heads of this width, or None."""
    if width % 8 or width > _WIDTHS[-1]:
        return f"the HIP kernel takes heads of a multiple of 8 up to {_WIDTHS[-1]} columns and not of {width}."
    return None


def chunks(options: Options, group: int) -> int:
    """Workgroups that share the query heads of a KV head."""
    return -(-group // int(options["HEADS"]))


def gemv(form: Form, rows: int, act: str, out: str, factor: str, code: str = "u8", fine: str = "u8") -> Options:
    """Of ``gemv.hip``, for a matrix of this form: storage tags of x, y, whole factors, codes and fine factors."""
    return {
        "BITS": form.bits, "GROUP": form.group, "SUPER": form.super, "ZERO": form.zero, "ROWS": rows,
        "OUTPUTS": OUTPUTS, "ACT": act, "OUT": out, "FACTOR": factor, "CODE": _c_type(code), "FINE": _c_type(fine),
    }  # fmt: skip


def norm(width: int, act: str, residual: str = "f32") -> Options:
    """Of ``norm.hip``, for rows of ``width``: storage tags of x and of the residual."""
    return {"WIDTH": width, "ACT": act, "RESIDUAL": residual}


def _c_type(tag: str) -> str:
    return {"int8": "i8", "fp8": "e4m3"}.get(tag, tag)
