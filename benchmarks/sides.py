"""The sides of a comparison: each measures works on a model in processes of its own, and gives tokens a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import IO, Any

from bars import Case, Work

from engine.formats import open_checkpoint
from engine.models.registry import load_model

Rates = dict[Work, float]


class SideError(Exception):
    """A side that could not measure; says what its process said last."""


def run(command: Iterable[Any], environment: dict[str, str] | None = None) -> str:
    """What a process prints; SideError when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})})
    if done.returncode:
        said = done.stderr.strip().splitlines()[-3:]
        raise SideError(f"{Path(words[0]).name} ended with {done.returncode}: {' '.join(said) or 'it said nothing'}")
    return done.stdout


def engine_command(
    model: Path, cases: Sequence[Case], kv: str, threads: int, repetitions: int, backend: str = "cpu"
) -> list[Any]:
    """What a user can rerun."""
    command = [sys.executable, "-m", "engine.cli.main", "bench", model, "--backend", backend, "--threads", threads]
    command += ["--repetitions", repetitions, "--json", *(() if kv == "auto" else ("--kv-dtype", kv))]
    for case in cases:
        command += ["--case", ",".join(map(str, astuple(case.work)))]
    return command


def engine_rates(
    model: Path, cases: Sequence[Case], threads: int, repetitions: int, backend: str = "cpu"
) -> dict[Case, float]:
    """By `engine bench`: a process for each dtype of the KV cache. An OpenCL driver for processors is given the threads in
    its own way."""
    found: dict[Case, float] = {}
    for kv in dict.fromkeys(case.kv for case in cases):
        own = [case for case in cases if case.kv == kv]
        command = engine_command(model, own, kv, threads, repetitions, backend)
        report = json.loads(run(command, {"POCL_MAX_PTHREAD_COUNT": str(threads)}))
        for case, row in zip(own, report["cases"], strict=True):
            rate = row["prefill_tok_s" if case.work.prompt else "decode_tok_s"]
            if rate is None:
                raise SideError(f"engine bench left {case.key} out: {row.get('skipped')}")
            found[case] = rate["median"]
    return found


@dataclass(frozen=True)
class LlamaSetting:
    """How llama.cpp is run: with which build of its CPU library, and with flash attention or without."""

    library: Path
    flash: bool

    def __str__(self) -> str:
        return f"{self.library.name}, -fa {'on' if self.flash else 'off'}"


class LlamaCpp:
    """llama.cpp's llama-bench for one sequence with an empty cache, llama-batched-bench for the rest.

    Which setting is fastest depends on the work: the first round of a model's works tries all, and later rounds those that
    were best at one of them. A work's rate is the best of the round's settings.
    """

    def __init__(self, folder: Path, threads: int, repetitions: int) -> None:
        self._folder = folder
        self._threads = threads
        self._repetitions = repetitions
        libraries = [folder / "bin", *sorted(folder.glob("cpu-*"))]
        self._all = [LlamaSetting(library, flash) for library in libraries for flash in (True, False)]

    def settings(self) -> list[LlamaSetting]:
        return list(self._all)

    def rates(self, model: Path, works: Sequence[Work], setting: LlamaSetting, kv: str = "f16") -> Rates:
        found: Rates = {}
        single = [work for work in works if work.batch == 1 and work.depth == 0 and work.prompt < 1024]
        if single:
            found |= llama_bench_rates(self._run(model, setting, kv, self._single(single)), single)
        several = [work for work in works if work not in single]
        if several:
            found |= batched_bench_rates(self._run(model, setting, kv, self._several(several)), several)
        return found

    def _single(self, works: Sequence[Work]) -> list[Any]:
        prompts, decodes = ({getattr(work, name) for work in works} - {0} or {0} for name in ("prompt", "decode"))
        lists = [",".join(map(str, sorted(sizes))) for sizes in (prompts, decodes)]
        return ["llama-bench", "-p", lists[0], "-n", lists[1], "-r", self._repetitions, "-o", "json"]

    def _several(self, works: Sequence[Work]) -> list[Any]:
        """A row of llama-batched-bench is a prompt and the decoding after it, so a case of each may share one."""
        prompt = {work.depth or work.prompt for work in works}
        decode = max(work.decode for work in works) or 1
        batches = sorted({work.batch for work in works})
        if len(prompt) > 1:
            raise ValueError("Works that share a process must have prompts of one length.")
        size = batches[-1] * (max(prompt) + decode) + 64
        lists = ["-npp", max(prompt), "-ntg", decode, "-npl", ",".join(map(str, batches))]
        return ["llama-batched-bench", *lists, "-c", size, "-tb", self._threads, "--output-format", "jsonl"]

    def _run(self, model: Path, setting: LlamaSetting, kv: str, tool: list[Any]) -> str:
        name, *flags = tool
        flash = "on" if setting.flash else "off"
        command = [self._folder / "bin" / name, "-m", model, "-t", self._threads, "-fa", flash, "-ctk", kv, "-ctv", kv]
        return run([*command, *flags], {"LD_LIBRARY_PATH": f"{setting.library}:{self._folder / 'bin'}"})


def llama_bench_rates(text: str, works: Sequence[Work]) -> Rates:
    """From `llama-bench -o json`: a row is either a prompt or a decoding."""
    rows = {(row["n_prompt"], row["n_gen"]): row["avg_ts"] for row in json.loads(text)}
    return {work: rows[work.prompt, work.decode] for work in works}


def batched_bench_rates(text: str, works: Sequence[Work]) -> Rates:
    """From `llama-batched-bench --output-format jsonl`, whose rows stand between other lines."""
    rows = {row["pl"]: row for row in map(json.loads, (line for line in text.splitlines() if line.startswith("{")))}
    return {work: rows[work.batch]["speed_pp" if work.prompt else "speed_tg"] for work in works}


def best(found: dict[LlamaSetting, Rates]) -> tuple[Rates, list[LlamaSetting]]:
    """Each work's best rate, and the settings that were best at one."""
    works = next(iter(found.values()))
    leaders = {work: max(found, key=lambda setting: found[setting][work]) for work in works}
    rates = {work: found[setting][work] for work, setting in leaders.items()}
    return rates, [setting for setting in found if setting in leaders.values()]


class Vllm:
    """vLLM on the CPU, in bf16, in one process that waits between its works: it takes most of a minute to start."""

    def __init__(self, environment: Path, shape: Path, threads: int, repetitions: int) -> None:
        self._repetitions = repetitions
        folder = environment / "shape"  # a lasting place: what vLLM compiles it keeps by the model's path
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(hf_config(shape)))
        self._log = (folder / "log").open("w+")
        script = Path(__file__).with_name("vllm_rates.py")
        self._process = subprocess.Popen(
            [str(environment / "bin/python"), str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=vllm_environment(environment, threads),
        )
        self._answer("READY")

    def rates(self, works: Sequence[Work]) -> Rates:
        found: Rates = {}
        for work in works:
            with suppress(BrokenPipeError):  # it has ended, and the next line tells how
                print(json.dumps({**asdict(work), "repetitions": self._repetitions}), file=self._in, flush=True)
            rates = json.loads(self._answer("RATES "))
            found[work] = sorted(rates)[len(rates) // 2]
        return found

    @property
    def _in(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _answer(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        self._log.seek(0)
        said = self._log.read().strip().splitlines()[-2:]
        raise SideError(f"vLLM ended: {' '.join(said) or 'it said nothing'}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def vllm_environment(environment: Path, threads: int) -> dict[str, str]:
    """As its installation guide recommends for speed: bound threads, and Intel's OpenMP and tcmalloc where there are any."""
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    wanted = [environment / "lib/libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    settings = {
        "LD_PRELOAD": ":".join(str(path) for path in wanted if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    return {**others, **settings}


def hf_config(shape: Path) -> dict[str, Any]:
    """config.json of a qwen3 GGUF's shape; vLLM fills the weights itself, since speed does not depend on them."""
    checkpoint = open_checkpoint(shape)
    if checkpoint.architecture != "qwen3":
        raise SideError(f"{shape.name} is a {checkpoint.architecture}; vLLM's shape is written for qwen3 alone.")
    config = load_model(checkpoint).config
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.eps,
        "rope_theta": float(checkpoint.metadata["qwen3.rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
