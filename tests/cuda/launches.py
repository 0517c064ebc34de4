"""What the ops launch for shapes as models have them, recorded on tensors without memory and compiled without a GPU.

Run as a script: ``launches.py TARGET [KERNEL ...]`` prints one line of JSON a kernel, or only for those named, with its
instructions, a program's registers, those spilled, shared memory, the reductions in its loops, what these copy from registers to
shared memory, the reads that they wait for and how many are on their way when it begins a round of one, whether it begins
early and whether the copy engine brings it tiles. ``launches.py TARGET
again`` prints the kernels that steps of other counts would have compiled once more. It must not run where TRITON_INTERPRET is
set.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.backend.v1 import BoundCall, Call, Dims, Frame, Packed, Value
from engine_cuda import providers, tiles
from engine_cuda.arrays import DTYPES
from engine_cuda.cuts import Cuts
from engine_cuda.kernels.common import OPTIONS, early
from engine_cuda.ops import cache, dense, head, recurrent, rows, step
from engine_cuda.repack import REPACKED
from engine_cuda.weights import WHOLE_ROW, Coded, Dense

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
    "gfx1201": GPUTarget("hip", "gfx1201", 32),
}
META = torch.device("meta")
CUTS = Cuts({}, Path("none"), "meta", lambda start: 0.0)
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8", torch.int32: "*i32",
    torch.uint32: "*u32", torch.uint8: "*u8", torch.float64: "*fp64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


def tensor(*shape, dtype="bf16"):
    return torch.empty(shape, dtype=DTYPES[dtype], device=META)


def matrix(format_, *shape):
    """A weight without its bytes."""
    tags = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
    if format_ in tags:
        return Dense(tensor(*shape, dtype=tags[format_]))
    name, _, whole = format_.partition(" ")
    form, depth = REPACKED[name], shape[-1]
    total = int(np.prod(shape[:-1]))
    if whole and form.e4m3:
        group = WHOLE_ROW if whole == "whole" else int(whole)
        codes, scale = tensor(total, depth, dtype="u8"), tensor(total, max(1, depth // group), dtype="f32")
        return Coded(replace(form, group=group, super=group), shape, codes, scale, None, None, None, None)
    if whole:
        form = replace(form, group=WHOLE_ROW, super=WHOLE_ROW, zero=0)
        return Coded(
            form, shape, tensor(total, depth, dtype="int8"), tensor(total, 1, dtype="f16"), None, None, None, None
        )
    together = tiles.together() if form.few else 0
    if together:  # tiles of 32 rows
        total, depth = int(np.prod(shape[:-2])) * -(-shape[-2] // 32), 32 * depth
    fine = tensor(total, depth // form.group, dtype="u8") if form.group != form.super else None
    least = name in ("Q4_1", "Q4_K", "Q5_K")
    scale = tensor(total, depth // form.super, dtype="f32" if name in ("NF4", "FP8") else "f16")
    table = None if form.table is None else tensor(len(form.table), dtype="f32")
    halves = 2 if together else 1
    codes = tensor(halves * total, depth * form.bits // 8 // halves, dtype="u8")
    least, fine_least = (scale, fine) if least else (None, None)
    return Coded(form, shape, codes, scale, fine, least, fine_least, table, together)


@dataclass
class Launch:
    """A kernel as it is launched: its arguments by name, and how it is compiled."""

    kernel: object
    arguments: dict
    options: dict

    def source(self):
        """As Triton's own launcher specializes: ones are constants, multiples of 16 are known as such, but where a kernel says
        that it is not to."""
        signature, constants, attrs = {}, {}, {}
        for n, parameter in enumerate(inspect.signature(self.kernel.fn).parameters.values()):
            name = parameter.name
            value = self.arguments[name]
            if "constexpr" in str(parameter.annotation):
                signature[name], constants[n,] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[name] = f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>"
            elif isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
                attrs[n,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif self.kernel.params[n].do_not_specialize:
                signature[name] = "i32"
            elif value == 1:
                signature[name], constants[n,] = "constexpr", 1
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    attrs[n,] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attrs), signature, constants

    def label(self):
        kept = (
            "DOT",
            "BM",
            "BN",
            "GROUP_ROWS",
            "BITS",
            "GROUP",
            "JOINED",
            "PARTS",
            "WIDTH",
            "BQ",
            "DECODE",
            "SCALED",
            "LATENT",
            "KIND",
        )
        parts = [f"{k}={v}" for k, v in self.arguments.items() if k in kept]
        return f"{self.kernel.fn.__name__} {' '.join(parts)}"


class Recorder:
    """Stands in for ``launch`` in the modules of ops."""

    def __init__(self):
        self.found = {}
        for module in (cache, dense, head, recurrent, rows, step):
            module.launch = self
        self.ops = {op: offered[0] for op, offered in providers.make_providers(META, CUTS, tiles.together()).items()}

    def __call__(self, kernel, grid, *args, **meta):
        assert all(size >= 0 for size in grid)
        names = list(inspect.signature(kernel.fn).parameters)
        if "EARLY" in names:
            meta |= early(tiles.architecture() in ("sm_90", "sm_100", "sm_120"))
        options = OPTIONS | {k: meta.pop(k) for k in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if k in meta}
        launch = Launch(kernel, {**dict(zip(names, args, strict=False)), **meta}, options)
        assert set(launch.arguments) == set(names), f"{kernel.fn.__name__}: {set(names) ^ set(launch.arguments)}"
        _, signature, constants = launch.source()
        self.found.setdefault((kernel.fn.__name__, str(signature), str(constants), str(options)), launch)

    def run(self, op, inputs, outputs=("bf16",), weights=None, states=None, dims=None, **attrs):
        """One call; ``inputs`` name -> tensor, ``weights`` name -> packed weight, ``outputs`` the dtypes of results."""
        values = {name: Value(n, name, tuple(t.shape), TAGS[t.dtype]) for n, (name, t) in enumerate(inputs.items())}
        results = tuple(Value(100 + n, f"out.{n}", ("T",), dtype) for n, dtype in enumerate(outputs))
        weights, states = weights or {}, states or {}
        packed = {name: Packed(handle, 0, lambda: np.zeros(0)) for name, handle in weights.items()}
        call = Call(op, values, results, dict.fromkeys(weights), {name: name for name in states}, attrs)
        frame = Frame(dims or Dims(), {values[n].id: t for n, t in inputs.items()}, states)
        provider, bound = self.ops[op], BoundCall(call, None, packed)
        function = provider.prepare(bound) if provider.prepare else provider.function
        function(providers.Operands(bound, frame, META, CUTS))


def vector(*shape):
    return Dense(tensor(*shape, dtype="f32"))


def record():
    """Every kernel, with the shapes of models of 1 to 70 billion parameters, as they are launched for one row and for many."""
    r = Recorder()
    ints = lambda *shape: tensor(*shape, dtype="i32")  # noqa: E731
    for tokens in (16, 512):
        _layers(r, tokens, ints)
    _rows(r, 16, 16, ints)
    _recurrent(r, 16, 16, ints)
    _head(r, ints)
    return list(r.found.values())


def compiled_again():
    """Kernels that would be compiled for some of these steps and not for others, which differ in their counts alone: of tokens,
    sequences, blocks of a page table and log-probabilities. A prompt alone takes some of them, and no other."""
    few = ((1, 16, 33, 1), (8, 2, 48, 16))
    more = ((49, 2, 1, 1), (64, 16, 16, 16), (50, 3, 7, 5))
    found = set()
    for steps in (few, more):
        ways = [_ways(*step) for step in steps]
        found |= {kernel for kernel, *_ in set.union(*ways) - set.intersection(*ways)}
    return sorted(found)


def _ways(tokens, seqs, pages, logprobs):
    """The kernels of a step, as they are compiled."""
    r = Recorder()
    ints = lambda *shape: tensor(*shape, dtype="i32")  # noqa: E731
    _layers(r, tokens, ints, seqs, pages)
    _rows(r, tokens, seqs, ints)
    _recurrent(r, tokens, seqs, ints, pages)
    _head(r, ints, seqs, tokens, pages, logprobs)
    return {(*key, str(launch.source()[0].attrs)) for key, launch in r.found.items()}


def _layers(r, tokens, ints, seqs=16, pages=512):
    x, wide = tensor(tokens, 4096), tensor(tokens, 14336)
    residual = tensor(tokens, 4096, dtype="f32")
    for format_ in ("BF16", "F16", "F32", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_XS", "NF4", "FP8"):
        r.run("linear", {"x": x}, weights={"weight": matrix(format_, 4096, 4096)})
    r.run(
        "linear",
        {"x": wide, "residual": residual},
        ("f32",),
        {"weight": matrix("BF16", 4096, 14336), "bias": vector(4096)},
    )
    r.run("linear", {"x": tensor(tokens, 4096, dtype="f32")}, ("f32",), {"weight": matrix("F32", 4096, 4096)})
    if tokens <= 16:
        for act, format_ in (("bf16", "Q4_0"), ("f16", "Q4_K"), ("f16", "NF4"), ("f16", "Q3_K"), ("bf16", "Q5_K")):
            r.run("linear", {"x": tensor(3, 4096, dtype=act)}, weights={"weight": matrix(format_, 4096, 4096)})
    for format_ in ("BF16", "Q4_K"):
        members = {f"weight.{n}": matrix(format_, outputs, 4096) for n, outputs in enumerate((4096, 1024, 1024))}
        r.run("linear_group", {"x": x}, ("bf16",) * 3, members)
    for format_ in ("Q8_0 whole", "Q4_K"):
        weights = {"weight": matrix(format_, 4096, 4096)}
        r.run("linear", {"x": x, "residual": residual}, ("f32",), weights, quantized_activation="required")
    for format_ in ("FP8 whole", "FP8 128") if tiles.multiplies_fp8() else ():
        weights = {"weight": matrix(format_, 4096, 4096)}
        r.run("linear", {"x": x, "residual": residual}, ("f32",), weights, quantized_activation="fp8")
    r.run("head_linear", {"x": tensor(tokens, 16 * 128)}, weights={"weight": matrix("BF16", 16, 512, 128)})
    _experts(r, tokens, ints)
    for dtype, width, more in (
        ("f16", 128, {}),
        ("bf16", 128, {}),
        ("int8", 128, {}),
        ("u8", 128, {}),
        ("f16", 64, {"window": 128, "sinks": True}),
        ("bf16", 64, {"window": 128, "causal": False}),
        ("bf16", 256, {"softcap": 50.0, "window": 4096}),
        ("bf16", 576, {"v_head_dim": 512}),
        ("int8", 576, {"v_head_dim": 512}),
        ("u8", 576, {"v_head_dim": 512}),
        ("f32", 128, {}),
        ("f32", 256, {}),
        ("f32", 576, {"v_head_dim": 512}),
    ):
        _cached(r, tokens, seqs, pages, ints, dtype, width, dict(more))


def _rows(r, tokens, seqs, ints):
    x, wide = tensor(tokens, 4096), tensor(tokens, 14336)
    residual = tensor(tokens, 4096, dtype="f32")
    r.run("concat_heads", {"a": tensor(tokens, 16 * 512), "b": tensor(tokens, 16 * 64)}, heads=16)
    r.run("rms_norm", {"x": residual}, weights={"weight": vector(4096)}, eps=1e-5)
    r.run("add_rms_norm", {"x": x, "residual": residual}, ("f32", "bf16"), {"weight": vector(4096)}, eps=1e-5)
    r.run("layer_norm", {"x": residual}, weights={"weight": vector(4096), "bias": vector(4096)}, eps=1e-5)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "clamped_swiglu"):
        r.run("gated_act", {"gate": wide, "up": wide}, kind=kind)
    r.run("add", {"a": residual, "b": x}, ("f32",))
    r.run("scale_softcap", {"x": x}, ("f32",), softcap=30.0)
    r.run("gather_rows", {"x": residual, "rows": ints(seqs)}, ("f32",))
    r.run("gather_columns", {"x": x}, weights={"columns": vector(4096)})
    r.run("embed", {"ids": ints(tokens)}, ("f32",), {"weight": matrix("BF16", 128256, 4096)})
    r.run("embed", {"ids": ints(tokens)}, ("f32",), {"weight": matrix("Q6_K", 128256, 4096)})


def _cached(r, tokens, seqs, pages, ints, dtype, width, more):
    latent = "v_head_dim" in more
    heads, kv_heads = (128, 1) if latent else (32, 8)
    kinds = ("k",) if latent else ("k", "v")
    states = {kind: tensor(4096, 16, kv_heads, width, dtype=dtype) for kind in kinds}
    if dtype == "int8":
        states |= {f"{kind}_scale": tensor(4096, 16, kv_heads, dtype="f32") for kind in kinds}
    shape = {"kv_heads": kv_heads, "head_dim": width}
    new = {f"new_{kind}": tensor(tokens, kv_heads * width) for kind in kinds}
    r.run("kv_write", {**new, "kv_slots": ints(tokens)}, (), None, states, latent=latent, **shape)
    r.run(
        "kv_copy", {"block_copies": ints(seqs, 2)}, (), None, {f"states.{n}": s for n, s in enumerate(states.values())}
    )
    q = tensor(tokens, heads * width)
    if not latent:
        norms = {name: vector(width) for name in ("q_norm", "k_norm")}
        places = {"positions": ints(tokens), "kv_slots": ints(tokens)}
        weights = {"inv_freq": vector(width // 2), **norms}
        r.run("rope_kv_write", {"q": q, **new, **places}, ("bf16",), weights, states, heads=heads, eps=1e-6, **shape)
        r.run(
            "rope",
            {"x": q, "positions": ints(tokens)},
            ("bf16",),
            {"inv_freq": vector(width // 2)},
            heads=heads,
            head_dim=width,
        )
    inputs = {"q": q, "seq_starts": ints(seqs), "query_offsets": ints(seqs + 1), "page_table": ints(seqs, pages)}
    weights = {"sinks": vector(heads)} if more.pop("sinks", False) else {}
    attrs = {"heads": heads, "scale": 0.1, "block_size": 16, **shape, **more}
    r.run("attention", inputs, ("bf16",), weights, states, **attrs)


def _recurrent(r, tokens, seqs, ints, pages=64):
    key_heads, value_heads, width, block_size = 16, 32, 128, 512
    columns = (2 * key_heads + value_heads) * width
    place = {"seq_starts": ints(seqs), "query_offsets": ints(seqs + 1), "page_table": ints(seqs, pages)}
    x, tail = tensor(tokens, columns), tensor(256, 3, columns, dtype="f32")
    r.run(
        "causal_conv",
        {"x": x, **place},
        ("bf16",),
        {"weight": vector(columns, 4)},
        {"tail": tail},
        block_size=block_size,
    )
    gates = {name: tensor(tokens, value_heads) for name in ("decay", "beta")}
    weights = {name: vector(value_heads) for name in ("rate", "bias")}
    memory = {"memory": tensor(256, value_heads, width, width, dtype="f32")}
    shape = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": width, "value_dim": width}
    r.run("gated_delta", {"qkv": x, **gates, **place}, ("bf16",), weights, memory, block_size=block_size, **shape)
    for heads, groups, state_dim, head_dim in ((128, 8, 128, 64), (32, 2, 256, 128), (48, 1, 64, 64)):
        x = tensor(tokens, heads * head_dim + 2 * groups * state_dim)
        taps = {"weight": vector(x.shape[1], 4), "bias": vector(x.shape[1])}
        tail = {"tail": tensor(256, 3, x.shape[1], dtype="f32")}
        r.run("causal_conv", {"x": x, **place}, ("bf16",), taps, tail, block_size=block_size)
        weights = {name: vector(heads) for name in ("rate", "bias", "skip")}
        memory = {"memory": tensor(256, heads, state_dim, head_dim, dtype="f32")}
        inputs = {"xbc": x, "dt": tensor(tokens, heads), **place}
        shape = {"heads": heads, "groups": groups, "state_dim": state_dim, "head_dim": head_dim}
        r.run("ssm_scan", inputs, ("bf16",), weights, memory, block_size=block_size, **shape)


def _experts(r, tokens, ints):
    for experts, more in ((128, {}), (256, {"groups": 8, "groups_kept": 4, "group_best": 2, "score": "sigmoid"})):
        weights = {"correction_bias" if more else "expert_scale": vector(experts)}
        r.run("moe_route", {"logits": tensor(tokens, experts)}, ("i32", "f32"), weights, k=8, **more)
    x = {"x": tensor(tokens, 2048), "ids": ints(tokens, 8)}
    for format_ in ("BF16", "Q4_K"):
        weights = {f"weight.{n}": matrix(format_, 128, 768, 2048) for n in range(2)}
        r.run("moe_linear_group", x, ("bf16", "bf16"), weights)
    r.run("moe_combine", {"y": tensor(tokens * 8, 2048), "weights": tensor(tokens, 8, dtype="f32")})


def _head(r, ints, n=64, total=512, pages=512, logprobs=20):
    width = 128256
    floats = lambda *shape: tensor(*shape, dtype="f32")  # noqa: E731
    history = {"history": ints(64, 8192)}
    tokens = {"token_ids": ints(total), "seq_slots": ints(n), "seq_starts": ints(n), "query_offsets": ints(n + 1)}
    fills = {"history_copies": ints(n, 2), **{f"fill_{name}": ints(n) for name in ("slots", "positions", "ids")}}
    table = {"page_table.0": ints(n, pages)}
    r.run("step_expand", {**tokens, **fills, **table}, ("i32",) * 4, None, history, block_sizes=(16,))
    place = {"rows": ints(n), "positions": ints(total), "token_seq": ints(total), "seq_slots": ints(n)}
    filters = (
        "temperature",
        "top_p",
        "min_p",
        "typical_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    )
    counts = ("prompt_lengths", "top_k", "no_repeat_ngram_size", "candidates", "mask_rows", "bias_ids")
    filtering = {**{k: floats(n) for k in filters}, **{k: ints(n) for k in counts}, "bias_offsets": ints(n + 1)}
    filtering |= {"bias_values": floats(n), "masks": tensor(n, width // 32, dtype="u32")}
    sampling = {"processed": floats(n, width), "temperature": floats(n), "want_logprobs": ints(n), "targets": ints(n)}
    sampling |= {"seeds": tensor(n, 2, dtype="u32"), "branches": tensor(n, dtype="u32"), "candidates": ints(n)}
    for act in ("bf16", "f32"):
        given = {"logits": tensor(n, width, dtype=act), **place}
        r.run("process_logits", {**given, **filtering}, ("f32",), None, history)
        r.run("sample", {**given, **sampling}, ("i32", "i32", "f32", "i32", "f32"), None, history, Dims(K=logprobs))


def _compiled(launch, target):
    """The kernel, the 32-bit registers that a thread has, and how many it spills, as ptxas or the assembler's notes tell it."""
    told = io.StringIO()
    with redirect_stdout(told):  # to which Triton writes what ptxas has said
        compiled = triton.compile(launch.source()[0], target=target, options=launch.options)
    if target.backend == "hip":
        notes = compiled.asm["amdgcn"]
        used, spilled = (sum(map(int, re.findall(rf"\.vgpr{kind}_count:\s*(\d+)", notes))) for kind in ("", "_spill"))
        return compiled, used, spilled
    used, spilled = (re.findall(rf"(\d+) {what}", told.getvalue()) for what in ("registers", "bytes spill st"))
    assert used and spilled, f"ptxas tells no registers:\n{told.getvalue()}"
    return compiled, sum(map(int, used)), sum(map(int, spilled)) // 4


_FP8 = r"wgmma\.mma_async\.sync\.aligned\.\w+\.f32\.e4m3|mma\.sync\.aligned[\w.:]*\.e4m3"
_MATRIX = rf"{_FP8}|wgmma\.mma_async|mma\.sync|tcgen05\.mma[\w.:]*|v_mfma_\w+|v_wmma_\w+|v_swmmac\w+"


def _within_loops(text, what):
    """Lines within loops in which ``what`` is found."""
    found, loops = 0, []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        loops = [loop for loop in loops if loop < indent]
        if "scf.for" in line:
            loops.append(indent)
        found += bool(loops) and re.search(what, line) is not None
    return found


def _awaited(text):
    """Reads within loops that a round needs itself, and for which it waits: others are for the next one."""
    lines = text.splitlines()
    yielded = set(re.findall(r"%[\w]+", "".join(line for line in lines if "scf.yield" in line)))
    moves = [re.findall(r"%[\w]+", line) for line in lines if re.search(r"= tt\.(join|trans)\b", line)]
    yielded |= {value for moved, *values in moves if moved in yielded for value in values}
    reads = [line.split()[0] for line in lines if "= tt.load" in line and line.startswith(" " * 6)]
    return sum(read not in yielded for read in reads)


def main(target, *names):
    tiles.architecture = lambda: target
    if names == ("again",):
        print(json.dumps(compiled_again()))
        return
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.disable_line_info = True  # which changes no instruction, and takes its time
    for launch in record():
        if names and launch.kernel.fn.__name__ not in names:
            continue
        compiled, registers, spilled = _compiled(launch, TARGETS[target])
        text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        about = {
            "kernel": launch.kernel.fn.__name__,
            "label": launch.label(),
            "dot": str(launch.arguments.get("DOT", "")),
            "width": launch.arguments.get("WIDTH", 0),
            "block": launch.arguments.get("BLOCK", 0),
            "matrix": sorted(set(re.findall(_MATRIX, text))),
            "registers": registers * TARGETS[target].warp_size * compiled.metadata.num_warps,
            "spilled": spilled,
            "shared": compiled.metadata.shared,
            "reduced": _within_loops(compiled.asm["ttir"], '"tt.reduce"'),
            "copied": _within_loops(compiled.asm["ttgir"], r"local_alloc %|local_store"),
            "awaited": _awaited(compiled.asm["ttgir"]),
            "early": "griddepcontrol.wait" in text and "griddepcontrol.launch_dependents" in text,
            "brought": "cp.async.bulk.tensor" in text,
            "ahead": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", text)), default=0),
        }
        print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
