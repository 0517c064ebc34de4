"""The HIP kernels in lockstep on the CPU, under the sanitizers, against the references."""

from __future__ import annotations

import numpy as np
import pytest
from on_cpu import Kernels, poisoned

from engine.backend.v1 import HOST_DTYPES, KVSpec
from engine.ops import OPS
from engine.ops.cases import random_batch
from engine.ops.dtypes import from_f32, to_f32
from engine.ops.kv import plain_states
from engine.testing.cases import CaseWeight, random_weight
from engine_cuda.repack import REPACKED, packed_codes
from engine_rocm import sources

STEP = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
SPLIT = 64  # parts are short here, so that short contexts have several

i32, f32 = np.int32, np.float32


# -- attention ---------------------------------------------------------------------------------------------------------


class Decode:
    """A step with sequences of one token and some of more, as the kernels and as the reference take it."""

    def __init__(self, rng, starts, group, width, block_size, act, kv, **attrs):
        lengths = [1, 1, 3, 1, 1]
        self.batch = random_batch(rng, starts, lengths, (block_size,), len(starts))
        self.group, self.kv_heads, self.width, self.act = group, 2, width, act
        self.heads, self.window = group * self.kv_heads, attrs.get("window", 0)
        spec = KVSpec(self.batch.blocks[0], block_size, self.kv_heads, width, kv)
        self.table = self.batch.page_tables[0]
        contents = {}
        for name in ("k", "v"):
            values = np.full((spec.blocks, block_size, self.kv_heads, width), np.nan, f32)
            for seq, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                positions = np.arange(start + length)
                place = self.table[seq, positions // block_size], positions % block_size
                values[place] = rng.standard_normal((len(positions), self.kv_heads, width), f32)
            contents[name] = values
        self.states = plain_states(spec, contents)
        for seq, start in enumerate(starts):
            if self.window:  # blocks out of sight are null
                self.table[seq, : max(0, start + 1 - self.window) // block_size] = 0
        self.q = from_f32(rng.standard_normal((sum(lengths), self.heads * width), f32) * f32(2), act)
        self.sinks = rng.standard_normal(self.heads, f32) if attrs.pop("sinks", False) else None
        self.softcap = attrs.get("softcap", 0.0)
        self.scale = width**-0.5
        self.attrs = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": width, "scale": self.scale,
            "block_size": block_size, **attrs,
        }  # fmt: skip
        self.alone = np.array([first for first, n in zip(np.cumsum([0, *lengths]), lengths, strict=False) if n == 1])

    def reference(self):
        return OPS["attention"].reference(
            q=to_f32(self.q, self.act), seq_starts=self.batch.seq_starts, query_offsets=self.batch.query_offsets,
            page_table=self.table, sinks=self.sinks, **self.states, **self.attrs,
        )[0]  # fmt: skip

    def run(self, kernels, chunks, splits):
        y = poisoned(self.q.shape, self.q.dtype)
        sequences = len(self.table)
        parts = [poisoned((sequences, self.heads, splits, n), f32) for n in (self.width, 1, 1)]
        lists = [self.batch.seq_starts, self.batch.query_offsets]
        kernels.run(
            "attend_decode", (sequences, self.kv_heads * chunks, splits), self.q, self.states["k"], self.states["v"],
            self.states.get("k_scale"), self.states.get("v_scale"), self.sinks, *lists, self.table, y, *parts,
            i32(self.table.shape[1]), i32(self.kv_heads), i32(self.group), i32(self.width), f32(self.scale),
            f32(self.softcap), i32(self.window), i32(splits),
        )  # fmt: skip
        if splits > 1:
            kernels.run(
                "merge_parts", (sequences, self.heads), *parts, self.sinks, *lists, y, i32(self.heads), i32(self.width),
                i32(self.window), i32(splits),
            )  # fmt: skip
        return y


CONTEXTS = [0, 150, 5, 63, 64], [15, 0, 40, 33, 16]  # tokens before the step: in several parts, and in one
FEATURES = [{}, {"window": 40}, {"softcap": 5.0, "sinks": True}, {"window": 7, "sinks": True}]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("warp", "group", "width", "act", "kv"),
    [
        (32, 4, 64, "f32", "f16"),
        (64, 3, 80, "bf16", "int8"),
        (32, 2, 32, "f32", "fp8"),
        slow(64, 4, 128, "bf16", "fp8"),
        slow(64, 4, 64, "f32", "f16"),
        slow(32, 6, 128, "f16", "int8"),
        slow(32, 1, 256, "f32", "bf16"),
    ],
)
def test_decode_attention(warp, group, width, act, kv, tmp_path):
    rng = np.random.default_rng()
    options = sources.attention(width, group, 16, act, kv, SPLIT)
    kernels = Kernels(tmp_path, "attention.hip", ("attend_decode", "merge_parts"), warp, options)
    for features in FEATURES:
        for starts in CONTEXTS if features == FEATURES[-1] else CONTEXTS[:1]:
            step = Decode(rng, starts, group, width, 16, act, kv, **features)
            want = step.reference()
            splits = -(-(max(starts) + 3) // SPLIT)
            y = step.run(kernels, sources.chunks(options, group), splits)
            got = to_f32(y, act)[step.alone]
            bound = 5e-5 + (5e-5 + STEP[act]) * np.abs(want[step.alone])
            assert (np.abs(got - want[step.alone]) <= bound).all(), (features, starts)
            others = np.setdiff1d(np.arange(len(y)), step.alone)
            assert (y[others] == poisoned(y[others].shape, y.dtype)).all(), "rows of longer sequences are not its own"


# -- products ----------------------------------------------------------------------------------------------------------


def _coded(rng, format_, outputs, depth):
    """A random matrix: its dense numbers, form, and parts as the kernel takes them."""
    weight = CaseWeight("w", random_weight(rng, format_, (outputs, depth)))
    form = REPACKED[format_]
    parts = form.split(weight.rows())
    return weight.dense(), form, parts, packed_codes(parts.codes, form.bits)


@pytest.mark.parametrize(
    ("warp", "format_", "rows", "act", "out"),
    [
        (32, "Q8_0", 1, "f16", "f16"),
        (64, "Q4_0", 3, "f32", "f32"),
        (32, "Q4_K", 4, "bf16", "f32"),
        slow(64, "Q4_K", 1, "f32", "bf16"),
        slow(64, "Q8_0", 1, "f16", "f16"),
        slow(32, "Q4_0", 3, "f32", "f32"),
        slow(64, "Q6_K", 1, "bf16", "bf16"),
        slow(32, "IQ4_XS", 2, "f32", "f32"),
        slow(64, "Q5_1", 2, "f16", "f32"),
        slow(32, "FP8", 1, "f32", "f32"),
    ],
)
def test_products_of_few_rows(warp, format_, rows, act, out, tmp_path):
    rng = np.random.default_rng()
    depth = 256 * 3 if REPACKED[format_].super == 256 else 32 * 27
    outputs = 4 * 5 + 1
    dense, form, parts, codes = _coded(rng, format_, outputs, depth)
    tag = {np.float16: "f16", np.float32: "f32"}[parts.scale.dtype.type]
    fine = "u8" if parts.fine_scale is None or parts.fine_scale.dtype == np.uint8 else "int8"
    kernels = Kernels(tmp_path, "gemv.hip", ("gemv",), warp, sources.gemv(form, rows, act, out, tag, fine=fine))
    for more in (False, True):
        x = from_f32(rng.standard_normal((rows, depth), f32), act)
        bias = rng.standard_normal(outputs, f32) if more else None
        residual = from_f32(rng.standard_normal((rows, outputs), f32), out) if more else None
        y = poisoned((rows, outputs), HOST_DTYPES[out])
        least = None if parts.least is None else parts.least.astype(parts.scale.dtype)
        groups, supers = (depth // size for size in (form.group, form.super))
        kernels.run(
            "gemv", (-(-outputs // sources.OUTPUTS),), x, codes, form.table, parts.scale,
            parts.fine_scale, least, parts.fine_least, bias, residual, y, i32(outputs), i32(depth), i32(codes.shape[1]),
            i32(groups), i32(supers),
        )  # fmt: skip
        wide, numbers = to_f32(x, act).astype(np.float64), dense.astype(np.float64)
        want, size = wide @ numbers.T, np.abs(wide) @ np.abs(numbers).T
        if least is not None:  # (code - zero) * scale may be much larger than what is left of it
            size = size + np.abs(wide) @ np.abs(_summands(parts, form, depth)).T
        if more:
            want = want + bias + to_f32(residual, out)
        bound = 2.0**-19 * size + 2.0**-22 + STEP[out] * np.abs(want) * (1 + 2.0**-10)
        assert (np.abs(to_f32(y, out) - want) <= bound).all()


def _summands(parts, form, depth):
    """Of a form with a least: what it is subtracted from."""
    scale = np.repeat(parts.scale.astype(np.float64), form.super, axis=1)[:, :depth]
    if parts.fine_scale is not None:
        scale = scale * np.repeat(parts.fine_scale.astype(np.float64), form.group, axis=1)[:, :depth]
    return parts.codes * scale


# -- norm and rounding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warp", [32, slow(64)])
def test_norm_and_rounding(warp, tmp_path):
    rng = np.random.default_rng()
    width, rows = 1000, 5
    kernels = Kernels(tmp_path, "norm.hip", ("norm_quantize",), warp, sources.norm(width, "f16"))
    for added in (False, True):
        x = from_f32(rng.standard_normal((rows, width), f32) * f32(3), "f16")
        residual = rng.standard_normal((rows, width), f32) if added else None
        x[1], x[2, 7] = 0, np.inf
        if added:
            residual[1] = 0
        weight = rng.uniform(-1, 1, width).astype(f32)
        codes, steps, total = poisoned((rows, width), np.int8), poisoned(rows, f32), poisoned((rows, width), f32)
        kernels.run(
            "norm_quantize", (rows,), x, residual, total if added else None, weight, codes, steps, i32(width),
            f32(1e-6), f32(1.0),
        )  # fmt: skip
        summed = x.astype(f32) if residual is None else x.astype(f32) + residual
        if added:
            np.testing.assert_array_equal(total, summed)
        assert np.isnan(steps[2]) and steps[1] == 1 and not codes[1].any()
        for row in (0, 3, 4):
            [normed] = OPS["rms_norm"].reference(x=summed[row : row + 1], weight=weight, eps=1e-6, weight_offset=1.0)
            want = np.abs(normed).max() / 127.5
            np.testing.assert_allclose(steps[row], want, rtol=3e-6)
            ratio = normed[0].astype(np.float64) / want
            near = 1e-5 * np.abs(ratio) + 1e-6  # where it is a tie but for rounding, either neighbour is right
            low, high = np.clip(np.rint(ratio - near), -128, 127), np.clip(np.rint(ratio + near), -128, 127)
            assert ((codes[row] >= low) & (codes[row] <= high)).all()


# -- the machine itself ------------------------------------------------------------------------------------------------

DEFECTS = r"""
#include "portable.h"
KERNEL(64) defective(const float* x, float* y, int defect) {
  SHARED(float, kept, 64);
  kept[thread()] = x[thread() + (defect == 1)];
  if (defect != 2) barrier();
  if (defect == 3 && thread() > 5) return;
  if (defect == 3) barrier();
  y[thread()] = kept[63 - thread() - (defect == 4)];
}
"""


def test_the_machine_finds_defects(tmp_path):
    """Reads beyond an array, a missing barrier, and one that not all threads come to."""
    (tmp_path / "defects.hip").write_text(DEFECTS)
    kernels = Kernels(tmp_path, tmp_path / "defects.hip", ("defective",), 32, {})
    x = np.random.default_rng().standard_normal(64, f32)
    y = poisoned(64, f32)
    kernels.run("defective", (1,), x, y, i32(0))
    np.testing.assert_array_equal(y, x[::-1])
    for defect, told in ((1, "heap-buffer-overflow"), (3, "divergent"), (4, "global-buffer-overflow")):
        done = kernels.start("defective", (1,), (x, y, i32(defect)), 64)
        assert done.returncode != 0 and told in done.stderr, defect
    kernels.run("defective", (1,), x, y, i32(2))
    assert np.isnan(y).any(), "what no thread has written yet is NaN"
