"""A GPU's kernels, checked and measured in one run: one JSON object, and benchmarks/results/gpu-NAME.json with --store.

usage: gpu.py [--backend cuda|rocm] [--sizes full|tiny] [--skip SECTION,...] [--store NAME]

Sections: ops (the conformance kit's random cases of every op), attention (decode beside float64 and the copy bandwidth),
tune (the products of the sections that follow in all ways of cutting them, the fastest of which they then take, and what that
gave; ``table`` is what a later start reads), matmul (4096^3 in each precision beside torch's own and, of a card whose data sheet
is known here, its dense rate), weights (products of few rows with 4 bits beside the copy bandwidth), swap (blocks of a cache to
the host's pinned pages and back, bit for bit), hip (the HIP sources through the run-time compiler, beside Triton's answers),
model (a random llama of 8 billion parameters in bf16: decode rates beside what reading weights and cache at the copy bandwidth
would take, the same with decode steps that are launched as they come, beside those that are recorded, and the time to a first
token; its own products are tuned first unless tune is left out), peers (transformers' continuous batching on the same model,
where that is installed). Figures are medians, and each ratio's two sides are of one run. ``bars`` says of each figure that has
one whether it is met. A section of which something fails says so and keeps the rest, and the exit status is 1; what each has
found is on stderr as soon as it has ended. With TRITON_INTERPRET=1 and --sizes tiny all of it runs on the CPU, which shows that
it runs and nothing else; there ENGINE_CUDA_GRAPHS=1 is needed, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import chain
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gpu_bars import judged
from gpu_calls import TAGS, Bench, distance, exact_attention
from gpu_model import embedding_bytes, prompt_operations, write_model
from gpu_peers import decode_rates
from result import write

from engine import SamplingParams
from engine.backend.registry import open_device
from engine.backend.v1 import Tuning, block_access_of, providers_of, tuning_of
from engine.cli.tune import step
from engine.ops import OPS
from engine.testing.checks import check_op

Figures = dict[str, Any]
BLOCK = 16
TUNING_S = 60.0
"""Seconds of a section after which no further product, or step of the model, is tuned: the rest takes the usual cuts."""


@dataclass(frozen=True)
class Sizes:
    """``attention``: sequences and their cached tokens. ``rows``: of the products with 4 bits. ``ops``: those that the kit
    examines, or all. ``decode``: sequences and cached tokens of the model's cases."""

    copy: int
    attention: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    matmul: int
    outputs: int
    rows: tuple[int, ...]
    layers: int
    decode: tuple[tuple[int, int], ...]
    prompt: int
    rounds: int
    ops: tuple[str, ...] = ()
    tiny: bool = False


FULL = Sizes(
    4 << 30, ((1, 8192), (16, 8192), (64, 8192)), (32, 8, 128), 4096, 14336, (1, 4, 16), 32,
    ((1, 512), (64, 512), (256, 512)), 2048, 10,
)  # fmt: skip
TINY = Sizes(
    1 << 16, ((2, 530),), (4, 2, 16), 256, 64, (1, 3), 1, ((1, 16), (2, 16)), 20, 1, ("add", "rms_norm"), True
)  # fmt: skip


DENSE_TOPS = {
    "H100 80GB HBM3": {"bf16": 989, "int8": 1979, "fp8": 1979}, "H200": {"bf16": 989, "int8": 1979, "fp8": 1979},
    "A100": {"bf16": 312, "int8": 624}, "MI300X": {"bf16": 1307, "int8": 2615, "fp8": 2615},
}  # fmt: skip
"""By a part of the card's name, 10^12 operations a second without sparsity, as its maker's data sheet has them."""
PRODUCTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bf16": ("BF16", {}, "bf16"),
    "w8a8": ("Q8_0", {"quantized_activation": "required"}, "int8"),
    "fp8 weights": ("FP8", {}, "bf16"),
    "fp8": ("FP8", {"quantized_activation": "fp8"}, "fp8"),
    "q4_k weights": ("Q4_K", {}, "bf16"),
}  # fmt: skip
"""Of matmul: the weight's format, the op's attributes, and the precision in which it is multiplied."""


class Run:
    """All sections on one device. ``tuned``: whether the model's products are cut as is the fastest, too."""

    def __init__(self, backend: str, sizes: Sizes, tuned: bool) -> None:
        device = open_device(backend, {})
        where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.backend, self.sizes, self.tuned = backend, sizes, tuned
        self._rates: dict[Any, float] = {}
        self.bench = Bench(device, where, sizes.rounds)
        self.bandwidth = self.bench.copy_bandwidth(sizes.copy)
        name = device.describe().name
        self.dense = next((rates for part, rates in DENSE_TOPS.items() if part in name), {})

    def ops(self) -> Figures:
        """Every op's random cases; what is wrong with those that fail."""
        failed, cases = {}, 0
        for op in self.sizes.ops or self.bench.device.providers():  # type: ignore[attr-defined]
            try:
                cases += check_op(self.bench.device, OPS[op], np.random.default_rng()).ran
            except Exception as error:  # kernels that do not compile each say so in their own way
                failed[op] = f"{type(error).__name__}: {error}"[:500]
        if failed:
            raise AssertionError(f"ops are wrong: {failed}")
        return {"cases": cases}

    def attention(self) -> Figures:
        return each(
            (f"{kv}, {sequences} x {cached}", partial(self._decode, kv, sequences, cached))
            for kv in ("bf16", "int8", "fp8") for sequences, cached in self.sizes.attention
        )  # fmt: skip

    def _decode(self, kv: str, sequences: int, cached: int) -> Figures:
        inputs, states, attrs = self._cached(kv, sequences, cached)
        once = self.bench.call("attention", inputs, states=states, **attrs)
        error = distance(once(), exact_attention(inputs, states, attrs))
        assert error < 2e-2, f"decode attention is off by {error:.3g} of the greatest value"
        nbytes = sum(state.nbytes for state in states.values())
        return {"error": error} | self._rate(nbytes, once)

    def _cached(
        self, kv: str, sequences: int, cached: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Figures]:
        """A step of one token a sequence; each cache block is some sequence's."""
        bench, (heads, kv_heads, width) = self.bench, self.sizes.heads
        blocks = -(-cached // BLOCK)
        shape = (sequences * blocks, BLOCK, kv_heads, width)
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=bench.where)  # noqa: E731
        states = {name: torch.randn(shape, device=bench.where).to(torch.bfloat16) for name in ("k", "v")}
        if kv == "int8":
            for name in ("k", "v"):
                states[name] = torch.randint(-127, 128, shape, dtype=torch.int8, device=bench.where)
                states[f"{name}_scale"] = torch.rand(shape[:3], device=bench.where) / 64 + 0.01
        if kv == "fp8":
            states = {name: state.to(torch.float8_e4m3fn).view(torch.uint8) for name, state in states.items()}
        inputs = {
            "q": bench.randn(sequences, heads * width),
            "seq_starts": ints([cached - 1] * sequences),
            "query_offsets": ints(list(range(sequences + 1))),
            "page_table": torch.randperm(shape[0]).to(torch.int32).to(bench.where).view(sequences, blocks),
        }
        attrs = {"heads": heads, "kv_heads": kv_heads, "head_dim": width, "scale": width**-0.5, "block_size": BLOCK}
        return inputs, states, attrs

    def tune(self) -> Figures:
        x = self.bench.randn(self.sizes.matmul, self.sizes.matmul)
        products = () if self.sizes.tiny else PRODUCTS  # the interpreter would take an hour
        calls = [(name, lambda name=name: self._product(name, x)[0]()) for name in products]
        with self._tuning(self.bench.device) as tuning:
            left = within(TUNING_S, chain(calls, ((name, once) for name, _, once in self._few_rows())))
        table = Path(tuning.path)  # which there is not where the one that comes with the package has all
        return gains(tuning) | left | {"table": json.loads(table.read_text()) if table.exists() else {}}

    @staticmethod
    def _tuning(device: Any) -> AbstractContextManager[Tuning]:
        tuning = tuning_of(device)
        assert tuning is not None
        return tuning()

    def matmul(self) -> Figures:
        """2 n^3 a second, and the same of torch's own product in that precision."""
        x = self.bench.randn(self.sizes.matmul, self.sizes.matmul)
        torchs = (
            (name, lambda once=once: {"tops": self._tops(once)}) for name, once in self._torch_products(x).items()
        )
        found = each(torchs)
        return each(((name, partial(self._multiplied, name, x, found)) for name in PRODUCTS), found)

    def _tops(self, once: Callable[[], Any]) -> float:
        return 2e-12 * self.sizes.matmul**3 / self.bench.seconds(once)

    def _multiplied(self, name: str, x: torch.Tensor, found: Figures) -> Figures:
        """One of the products; ``found`` has torch's own."""
        precision = PRODUCTS[name][2]
        once, weight = self._product(name, x)
        want = x.double() @ torch.from_numpy(weight.dense()).to(x.device).double().T
        error = distance(once(), want)
        assert error < (6e-2 if name == "fp8" else 3e-2), f"{name}: off by {error:.3g} of the greatest value"
        more = {}
        if PRODUCTS[name][1]:
            more = {"tops_with_quantizing_x": self._tops(once)}
            tops = self._tops(self._of_bytes(x, weight))
        else:
            tops = self._tops(once)
        beside = found.get(f"torch {precision}")
        of_torch = {} if beside is None else {"of_torch": tops / beside["tops"]}
        return {"error": error, "tops": tops, **more} | self._of_dense(tops, precision) | of_torch

    def _of_bytes(self, x: torch.Tensor, weight: Any) -> Callable[[], Any]:
        """The product with an x that is already quantized, as torch's own takes it."""
        from engine_cuda.ops.dense import by_codes

        provider: Any = providers_of(self.bench.device)["linear"][0]
        packed, most = provider.pack(weight, ("linear",), lambda _: None).handle, x.float().abs().amax(1)
        if packed.form.e4m3:
            scale = most / 448
            codes = (x / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            scale = most / 127
            codes = (x / scale[:, None]).round().to(torch.int8)
        y = torch.empty(len(x), packed.shape[0], dtype=self.bench.act, device=x.device)
        return lambda: by_codes((codes, scale), packed, y, None, None, provider.cuts)

    def _of_dense(self, tops: float, precision: str) -> Figures:
        """As a part of what the card's data sheet has, where that is known."""
        return {"of_dense": tops / self.dense[precision]} if precision in self.dense else {}

    def _product(self, name: str, x: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Any]:
        """A square product that is called by this name, and its weight."""
        format_, attrs, _ = PRODUCTS[name]
        weight = self.bench.matrix(format_, x.shape[1], x.shape[1])
        if attrs:
            weight = one_scale(weight, 2 if format_ == "Q8_0" else 4)
        return self.bench.call("linear", {"x": x}, weights={"weight": weight}, **attrs), weight

    def _torch_products(self, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
        wide, codes = x.to(torch.bfloat16), torch.randint(-127, 128, x.shape, dtype=torch.int8, device=x.device)
        found: dict[str, Callable[[], Any]] = {"torch bf16": lambda: wide @ wide.T}
        found["torch int8"] = lambda: torch._int_mm(codes, codes.T)
        if x.is_cuda:
            eights, one = wide.to(torch.float8_e4m3fn), torch.ones((), device=x.device)
            found["torch fp8"] = lambda: torch._scaled_mm(eights, eights.T, one, one, out_dtype=torch.bfloat16)
        return found

    def weights(self) -> Figures:
        """Bytes of the packed matrix a second."""
        return each((name, partial(self._rate, nbytes, once)) for name, nbytes, once in self._few_rows())

    def _rate(self, nbytes: int, once: Callable[[], Any]) -> Figures:
        rate = nbytes / self.bench.seconds(once)
        return {"gb_s": rate / 1e9, "of_copy": rate / self.bandwidth}

    def _few_rows(self) -> Iterator[tuple[str, int, Callable[[], torch.Tensor]]]:
        """Products with 4 bits: what each is called, and bytes of its weight."""
        for format_ in ("Q4_0", "Q4_K", "NF4"):
            weight = self.bench.matrix(format_, self.sizes.outputs, self.sizes.matmul)
            for rows in self.sizes.rows:
                x = self.bench.randn(rows, self.sizes.matmul)
                once = self.bench.call("linear", {"x": x}, weights={"weight": weight})
                yield f"{format_}, {rows} rows", weight.rows().nbytes, once

    def swap(self) -> Figures:
        device, (_, kv_heads, width) = self.bench.device, self.sizes.heads
        shape = (max(self.sizes.copy >> 19, 4), BLOCK, kv_heads, width)
        state = torch.randn(shape, device=self.bench.where).to(torch.float16)
        blocks = np.random.default_rng().permutation(shape[0]).astype(np.int32)
        access = block_access_of(device)
        assert access is not None
        rows = access.export_blocks(state, blocks)
        assert np.array_equal(rows, state.cpu().numpy()[blocks]), "saved blocks are not those of the cache"
        pinned = torch.from_numpy(rows).is_pinned()
        assert pinned == state.is_cuda, "saved blocks lie in pages that the GPU cannot read by itself"
        back = access.import_blocks(torch.zeros_like(state), blocks, rows)
        assert torch.equal(back, state), "restored blocks are not what was saved"
        out = self.bench.seconds(lambda: access.export_blocks(state, blocks))
        into = self.bench.seconds(lambda: access.import_blocks(back, blocks, rows))
        return {f"{rows.nbytes} bytes": {"out_gb_s": rows.nbytes / out / 1e9, "in_gb_s": rows.nbytes / into / 1e9}}

    def hip(self) -> Figures:
        """The device with kernels in HIP C++, through NVRTC or hipRTC."""
        if self.bench.where.type != "cuda":
            return {"left out": "the run-time compilers' code runs on GPUs alone"}
        from engine_cuda import tiles
        from engine_rocm.device import RocmDevice
        from engine_rocm.rtc import CUDA, HIP, GpuRuntime

        runtime = GpuRuntime(CUDA if torch.version.hip is None else HIP, tiles.architecture())
        hip = Bench(
            RocmDevice(self.bench.where, TAGS[self.bench.act], runtime, "HIP"), self.bench.where, self.sizes.rounds
        )
        inputs, states, attrs = self._cached("int8", *self.sizes.attention[-1])
        weight = self.bench.matrix("Q4_K", self.sizes.outputs, self.sizes.matmul)
        x = self.bench.randn(1, self.sizes.matmul)
        calls: dict[str, tuple[int, Callable[[Bench], Callable[[], torch.Tensor]]]] = {
            "decode attention, int8": (
                sum(state.nbytes for state in states.values()),
                lambda bench: bench.call("attention", inputs, states=states, **attrs),
            ),
            "product of 1 row, Q4_K": (
                weight.rows().nbytes,
                lambda bench: bench.call("linear", {"x": x}, weights={"weight": weight}),
            ),
        }

        def beside(nbytes: int, make: Callable[[Bench], Callable[[], torch.Tensor]]) -> Figures:
            once = make(hip)
            error = distance(once(), make(self.bench)())
            assert error < 2e-2, f"HIP and Triton differ by {error:.3g} of the greatest value"
            return {"from_triton": error} | self._rate(nbytes, once)

        return each((name, partial(beside, *call)) for name, call in calls.items())

    @cached_property
    def _model(self) -> Path:
        """Its folder, which is removed with this."""
        self._folder = tempfile.TemporaryDirectory()
        return write_model(Path(self._folder.name), self.sizes.layers, self.sizes.tiny)

    def _cases(self) -> list[Any]:
        from engine.cli.measure import Case

        decode = 8 if self.sizes.tiny else 64
        return [Case(n, depth, 0, decode) for n, depth in self.sizes.decode]

    def whole_model(self) -> Figures:
        from engine import LLM
        from engine.cli.measure import Bench as Rates
        from engine.cli.measure import Case

        model, prompt = self._model, self.sizes.prompt
        cases = [*self._cases(), Case(1, 0, prompt, 0)]
        settings: dict[str, Any] = {
            "max_num_seqs": max(case.batch for case in cases),
            "kv_cache_tokens": max(case.tokens(BLOCK) for case in cases) + BLOCK,
            "max_model_len": max(case.context for case in cases) + BLOCK,
        }
        tuned = self._tune_model(lambda: LLM(model, backend=self.backend, **settings), cases)
        with LLM(model, backend=self.backend, **settings) as llm:
            rates, repetitions = Rates(llm), 1 if self.sizes.tiny else 3
            results = [rates.measure(case, repetitions, rates.refusal(case)) for case in cases]
            found: Figures = {"graphs": llm.loaded.device.graphs.told}  # type: ignore[attr-defined]
            graphs = partial(self._without_graphs, llm, lambda case: rates.measure(case, repetitions, None), results)
            found = each([("recorded by launched", graphs)], found)
            memory = llm.loaded.memory
            token = sum(group.bytes_a_token for group in memory.groups)
            weights = memory.weights - embedding_bytes(model)
            operations = prompt_operations(model, weights, prompt)
        for case, result in zip(cases, results, strict=True):
            assert result.skipped is None, result.skipped
            if case.prompt:
                seconds = case.prompt / float(np.median(result.prefill))
                tops = operations / seconds / 1e12
                found[f"prompt of {case.prompt}"] = {"first_token_s": seconds, "tops": tops} | self._of_dense(
                    tops, "bf16"
                )
                continue
            rate = self._rates[case] = float(np.median(result.decode))
            floor = (weights + case.batch * (case.depth + case.decode / 2) * token) / self.bandwidth
            found[f"decode, {case.batch} x {case.depth}"] = {"tok_s": rate, "of_floor": rate * floor / case.batch}
        return found | tuned

    def peers(self) -> Figures:
        """The continuous batching of transformers, beside what the engine has made of the same cases."""
        if find_spec("transformers") is None:
            return {"left out": "transformers is not installed"}
        if self.bench.where.type == "cuda":
            torch.cuda.empty_cache()
        found: Figures = {}
        for case, peer in decode_rates(self._model, self._cases(), self.bench.where, self.bench.act).items():
            beside = {"by_transformers": self._rates[case] / peer["tok_s"]} if case in self._rates else {}
            found[f"{case.batch} x {case.depth}"] = {"tok_s": peer["tok_s"]} | beside
            found[f"setting, {case.batch} x {case.depth}"] = peer["setting"]
        return found

    def _tune_model(self, load: Callable[[], Any], cases: list[Any]) -> Figures:
        """Its products, of as many rows as the cases' steps have."""
        if not self.tuned:
            return {}
        with load() as llm, self._tuning(llm.loaded.device) as tuning:
            steps = sorted({case.prompt or case.batch for case in cases})
            left = within(TUNING_S, [(f"{n} tokens", partial(step, llm, n)) for n in steps])
        return {"tuned": gains(tuning)} | left

    def _without_graphs(self, llm: Any, measure: Callable[[Any], Any], results: list[Any]) -> Figures:
        """What decode steps make of it to be recorded, and that tokens are the same without."""
        graphs, params = llm.loaded.device.graphs, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        assert graphs.off is None, graphs.told
        prompts = [np.random.default_rng(n).integers(3, 300, 5 + n).tolist() for n in range(2)]
        want = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        graphs.off = "measured without."
        got = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        assert got == want, "other tokens with recorded steps than without"
        return {
            f"{result.case.batch} x {result.case.depth}": float(np.median(result.decode))
            / float(np.median(measure(result.case).decode))
            for result in results
            if result.case.decode and result.skipped is None
        }


def one_scale(weight: Any, nbytes: int) -> Any:
    """A matrix of blocks of 32 bytes, whose scales have so many, with one scale a row, as checkpoints of that kind have it."""
    rows = weight.rows().reshape(len(weight.rows()), -1, 32 + nbytes).copy()
    rows[:, :, :nbytes] = rows[:, :1, :nbytes]
    return type(weight)("weight", (weight.format, rows.reshape(len(rows), -1), weight.shape))


def each(
    calls: Iterable[tuple[str, Callable[[], Figures]]], before: Mapping[str, Any] = MappingProxyType({})
) -> Figures:
    """What is called by these names gives, behind what there was ``before``, and under "failed" why one failed, which takes
    nothing from the others."""
    found, failed = dict(before), dict(before.get("failed", {}))
    for name, call in calls:
        try:
            found[name] = call()
        except Exception as error:
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"[:500]
    return found | ({"failed": failed} if failed else {})


def within(seconds: float, calls: Iterable[tuple[str, Callable[[], Any]]]) -> Figures:
    """Calls what is called by these names, one at least, until the time is over; then the names that are left."""
    end, left = 0.0, []
    for name, call in calls:
        if end and time.monotonic() >= end:
            left.append(name)
            continue
        end = end or time.monotonic() + seconds
        call()
    return {"not tuned, as the time was over": left} if left else {}


def gains(tuning: Tuning) -> Figures:
    """Of each kernel that was measured how it is cut, and the rate beside that of the usual cut, where there is one."""
    return {found.what: {"ratio": found.usual_s / found.best_s} for found in tuning.found if isfinite(found.usual_s)}


SECTIONS = {
    "ops": Run.ops, "attention": Run.attention, "tune": Run.tune, "matmul": Run.matmul, "weights": Run.weights,
    "swap": Run.swap, "hip": Run.hip, "model": Run.whole_model, "peers": Run.peers,
}  # fmt: skip


def measure(run: Run, sections: list[str]) -> tuple[Figures, bool]:
    """The figures of each section, and whether none has failed."""
    info = run.bench.device.describe()
    found: Figures = {"device": info.name, "details": dict(info.details), "copy_gb_s": run.bandwidth / 1e9}
    good = True
    for name in sections:
        start = time.monotonic()
        try:
            found[name] = SECTIONS[name](run)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:1000]}
        good &= "failed" not in found[name]
        found[name]["seconds"] = round(time.monotonic() - start, 2)
        print(json.dumps({name: found[name]}), file=sys.stderr, flush=True)
    found["bars"] = judged(found)
    return found, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "rocm"))
    parser.add_argument("--sizes", default="full", choices=("full", "tiny"))
    parser.add_argument("--skip", default="", help="sections to leave out")
    parser.add_argument("--store", default="", metavar="NAME")
    options = parser.parse_args()
    sections = [name for name in SECTIONS if name not in options.skip.split(",")]
    with redirect_stdout(sys.stderr):  # Triton and transformers print what they find wrong
        run = Run(options.backend, FULL if options.sizes == "full" else TINY, "tune" in sections)
        found, good = measure(run, sections)
    print(json.dumps(found, indent=1))
    if options.store:
        write(f"gpu-{options.store}", found)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
