"""Writes the tables of README.md and of docs/performance.md and performance-machines.md from benchmarks/results, between
their markers.

usage: tables.py [--check]      --check fails when a page is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from gpu_bars import BARS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def origin(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['date'][:10]}, commit {result['commit']}, {machine['cpu']}, {machine['cores']} cores."


def peers(name: str) -> str:
    result = load(name) | {"skipped": []}  # which models were not there is said where it is run
    return f"{bars_table(result)} {origin(result)}"


def bars_table(result: dict[str, Any]) -> str:
    """Each case of cpu_peers.py with its bars; fractions of limits as percentages."""
    lines = [
        "| model | work | engine, tok/s | llama.cpp, tok/s | x | vLLM bf16, tok/s | x | of the limits | bars |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        cells = [case["model"], case["what"], f"{case['engine']:.1f}"]
        for peer in ("llama.cpp", "vLLM"):
            cells += [f"{case[peer]['rate']:.1f}", f"{case[peer]['ratio']:.2f}"] if peer in case else ["", ""]
        cells += [", ".join(f"{name} {part:.0%}" for name, part in case["of"].items())]
        cells += ["; ".join(map(bar_text, case["bars"]))]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"| {one['job']} | skipped: {one['why']} | | | | | | | |" for one in result["skipped"]]
    limits = ", ".join(limit_text(name, value) for name, value in result["limits"].items() if value)
    others = [
        f"{case['what']}, {name}: {case[name]:.1f} tok/s." for case in result["cases"] for name in case if " KV" in name
    ]
    how = f"{result['threads']} threads, medians of {result['rounds']} rounds. Limits measured between: {limits}."
    return "\n".join([*lines, "", " ".join([how, *others])])


def bar_text(bar: dict[str, Any]) -> str:
    peer = bar["against"] in ("llama.cpp", "vLLM")
    least = f"{bar['least']:g} x {bar['against']}" if peer else f"{bar['least']:.0%} of {bar['against']}"
    return f"{least}: " + {True: "met", False: "**missed**", None: "not measured"}[bar["met"]]


def limit_text(name: str, value: float) -> str:
    return f"{name} {value / 1e9:.1f} GB/s" if name == "bandwidth" else f"{name} {value / 1e12:.2f} TOPS"


def accuracy() -> str:
    result = load("accuracy")
    lines = [
        "| model | KV cache | prefill: engine | llama.cpp | x | decode: engine | llama.cpp | x | bar |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        cells = [case["model"].removesuffix(".gguf"), {"int8": "int8 (q8_0)"}.get(case["kv"], case["kv"])]
        for part in ("prefill", "decode"):
            row = case[part]
            cells += [f"{row['engine']:.4f}", f"{row['llama.cpp']:.4f}", f"{row['ratio']:.2f}"]
        met = all(case[part]["met"] for part in ("prefill", "decode"))
        lines.append("| " + " | ".join([*cells, "met" if met else "**missed**"]) + " |")
    how = f"RMS error of logits, median of {result['prompts']} prompts of {result['length']} tokens"
    lines += ["", f"{how}; bar: at most {result['bar']} x llama.cpp's; {origin(result)}"]
    return "\n".join(lines)


def embeddings() -> str:
    result = load("embedding-peers")
    lines = ["| model | engine, tok/s | llama.cpp, tok/s | x |", "|---|---|---|---|"]
    for case in result["cases"]:
        cells = [case["model"], f"{case['engine']:.0f}", f"{case['llama.cpp']:.0f}", f"{case['ratio']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    how = f"Texts of {result['tokens']} tokens, {result['threads']} threads, medians of {result['rounds']} rounds."
    return "\n".join([*lines, "", f"{how} {origin(result)}"])


def startup() -> str:
    result = load("startup")
    rows = [
        ("`import engine`", f"{result['import_engine_s']:.3f} s"),
        ("`engine --help`", f"{result['help_s']:.2f} s"),
        ("`engine generate` to its first token", f"{result['cold_start_s']:.2f} s"),
        ("resident after load, beside the weights", f"{result['resident_after_load_beside_weights_mb']:.0f} MB"),
        ("base install", f"{result['base_install_mb']:.0f} MB"),
        ("building the wheel", f"{result['wheel_build_s']:.0f} s"),
    ]
    lines = ["| what | figure |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), "", origin(result)]
    return "\n".join(lines)


def chat_times() -> str:
    result = load("chat-times")
    demo, sooner = result["demo_first_token_s"], result["times_sooner"]
    rows = [
        ("`engine chat` with the demo, from its start to the first character", f"{demo:.2f} s", "0.5 s", demo < 0.5),
        (
            f"first token of the second turn after {result['prompt_tokens']} tokens, KV kept",
            f"{result['second_turn_kept_s']:.2f} s, {sooner:.0f} times sooner than without",
            "10 times",
            sooner >= 10,
        ),
    ]
    lines = ["| what | figure | bar |", "|---|---|---|"]
    lines += [f"| {what} | {figure} | {bar}: {'met' if met else '**missed**'} |" for what, figure, bar, met in rows]
    return "\n".join([*lines, "", f"{result['model']}; {origin(result)}"])


def serving(name: str) -> str:
    result = load(name)
    bars, once, rate = result["bars"], result["at_once"], result["same_rate"]
    ours, theirs, times = once["engine"], once["peer"], once["times_requests"]
    rows = [
        (
            f"{result['requests']} conversations at once, requests/s",
            f"{ours['request_throughput']:.2f}",
            f"{theirs['request_throughput']:.2f}",
            f"{times:.2f} x",
            (f"{bars['requests']:g} x", times >= bars["requests"]),
        ),
        (
            "... output tok/s",
            f"{ours['output_throughput']:.0f}",
            f"{theirs['output_throughput']:.0f}",
            f"{ours['output_throughput'] / theirs['output_throughput']:.2f} x",
            None,
        ),
    ]
    if "vllm" in once:
        other, x = once["vllm"]["request_throughput"], once["times_vllm"]
        judged = (f"{bars['vllm']:g} x", x >= bars["vllm"])
        rows.insert(
            1, ("... beside vLLM in bf16", f"{ours['request_throughput']:.2f}", f"{other:.2f}", f"{x:.2f} x", judged)
        )
    for key, title in (("ttft", "first token"), ("tpot", "a further token")):
        a, b = rate["engine"][f"{key}_ms"]["p99"], rate["peer"][f"{key}_ms"]["p99"]
        what = f"{title}, p99 at {rate['rate']:.2f} requests/s"
        rows.append((what, f"{a:.0f} ms", f"{b:.0f} ms", f"{b / a:.2f} x", ("no worse", a <= b)))
    static, long = result["static"], result["long_prompt"]
    for how_batched, times, kind, bar in (
        ("static", "times", "in static batches, computed until the longest ends", bars["static"]),
        ("leaving", "times_leaving", "in batches that answers leave as they end", None),
    ):
        what = f"{static['batch']} at a time, requests/s: continuous, and {kind}"
        values = f"{static['continuous']:.2f} and {static[how_batched]:.2f}"
        least = bar and (f"{bar:g} x", static[times] >= bar)
        rows.append((what, values, "", f"{static[times]:.2f} x", least))
    what = f"between tokens of {long['decodes']} answers while a prompt of {long['prompt']} comes: p50 and p99"
    values = f"{long['itl_p50_ms']:.0f} and {long['itl_p99_ms']:.0f} ms"
    rows.append(
        (what, values, "", f"{long['times']:.2f} x", (f"at most {bars['itl']:g} x", long["times"] <= bars["itl"]))
    )
    lines = ["| work | engine | peer: llama-server | | bar |", "|---|---|---|---|---|"]
    for what, a, b, x, least in rows:
        shown = "" if least is None else f"{least[0]}: {'met' if least[1] else '**missed**'}"
        lines.append(f"| {what} | {a} | {b} | {x} | {shown} |")
    how = f"{result['model']}, {result['threads']} threads, medians of {result['rounds']} rounds; the peer with its best of"
    how += f" {', '.join(name.split()[1] for name in once['tried'])} slots, {once['peer_name'].split()[1]}"
    return "\n".join([*lines, "", f"{how}; {origin(result)}"])


def soak() -> str:
    """What was answered in minutes at twice what a server takes, and what was left of it."""
    result = load("serving-soak")
    answers, free = result["answers"], "none" if result["passed"]["all_free"] else "some"
    others = sum(answers.values()) - answers["completed"] - answers["429"]
    rows = [
        ("connections, seconds", f"{result['connections']}, {result['seconds']:.0f}"),
        ("requests answered; refused with 429; anything else", f"{answers['completed']}; {answers['429']}; {others}"),
        ("resident memory, most of the second quarter; of the last", mebibytes(result, "before", "after")),
        (
            "greedy answers in the midst with the tokens they have alone; with others",
            f"{result['same']}; {result['different']}",
        ),
        ("requests and blocks of the cache left in use", free),
    ]
    lines = ["| what | seen |", "|---|---|", *(f"| {what} | {seen} |" for what, seen in rows)]
    return "\n".join([*lines, "", origin(result)])


def mebibytes(result: dict[str, Any], *names: str) -> str:
    return "; ".join(f"{result[f'memory_{name}'] / 2**20:.0f} MiB" for name in names)


def stages() -> str:
    """What the host takes of a step, and what text beside the loop gains."""
    result = load("stages")
    name = {"cpu": f"processor, {result['threads']} threads"}
    what = f"{result['models'][0]['model']}, {result['streams']} sequences on"
    lines = [
        f"| {what} | between steps | tok/s | of those with text made in the loop |",
        "|---|---|---|---|",
        *(
            f"| {name.get(m['backend'], m['backend'])} | {m['host_share']:.1%} | {m['tok_s']:.0f} | {m['gain']:.2f} |"
            for m in result["models"]
        ),
    ]
    return "\n".join([*lines, "", origin(result)])


def host() -> str:
    """What a server leaves of a fast device."""
    result = load("serving-host")
    lines = [
        "| streams, ms a step | of the device's rate | before | tok/s | processor a token, us | before |",
        "|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        now, before = case["now"], case["before"]
        lines.append(
            f"| {case['streams']}, {case['step_ms']:g} | {now['share']:.0%} | {before['share']:.0%} | {now['tok_s']:.0f} |"
            f" {now['cpu_us']:.0f} | {before['cpu_us']:.0f} |"
        )
    how = f"Answers of {result['tokens']} tokens, medians of {result['rounds']} rounds; {origin(result)}"
    return "\n".join([*lines, "", how])


def speculation() -> str:
    """What guesses gain, by how many of their tokens are right."""
    result = load("speculation")
    lines = [
        "| guessed tokens that are right | tokens a step | tok/s | of those without guesses |",
        "|---|---|---|---|",
    ]
    for case in result["cases"]:
        share = "none is guessed" if case["right"] is None else f"{case['right']:.0%}"
        lines.append(f"| {share} | {case['tokens_a_step']:.2f} | {case['tok_s']:.1f} | {case['gain']:.2f} |")
    how = f"{result['model']}, one sequence, --speculate {result['guesses']}, {result['threads']} threads"
    return "\n".join([*lines, "", f"{how}, medians of {result['rounds']} rounds; {origin(result)}"])


def profile() -> str:
    """Milliseconds a step by kernel, a column a work."""
    result = load("step-profile")
    works = result["works"]
    names = [f"{w['tokens']} token{'s' if w['tokens'] > 1 else ''} after {w['before']}" for w in works]
    kernels = dict.fromkeys(name for work in works for name, ms in work["kernels_ms"].items() if ms >= 0.05)
    lines = [f"| ms a step | {' | '.join(names)} |", "|---" * (len(works) + 1) + "|"]
    for kernel in kernels:
        cells = [f"{w['kernels_ms'][kernel]:.2f}" if kernel in w["kernels_ms"] else "" for w in works]
        lines.append(f"| {kernel} | {' | '.join(cells)} |")
    walls = " | ".join(f"{work['step_ms']:.2f}" for work in works)
    lines.append(f"| all, host included | {walls} |")
    return "\n".join([*lines, "", f"{result['model']}, {result['threads']} threads; {origin(result)}"])


def variants(name: str) -> str:
    """Rates of each variant of the CPU's kernels, and how many times those of AVX2 they are."""
    result = load(name)
    isas = result["variants"]
    lines = [f"| model | work | {', tok/s | '.join(isas)}, tok/s |", "|---|---" + "|---" * len(isas) + "|"]
    for case in result["cases"]:
        cells = [case["model"], case["what"]]
        cells += [f"{case['rates'][isa]:.1f} ({case['ratios'][isa]:.2f})" for isa in isas]
        lines.append("| " + " | ".join(cells) + " |")
    how = f"{result['threads']} threads, medians of {result['rounds']} rounds in turn; in brackets times avx2's rate."
    return "\n".join([*lines, "", f"{how} {origin(result)}"])


def gpu(name: str) -> str:
    """The newest figure of each section that a card has, and the first one beside it."""
    result = load(name)
    lines = ["| work | first | now | bar |", "|---|---|---|---|"]
    for section, title, key, pattern in GPU_ROWS:
        runs = [run[section] for run in result["runs"] if section in run]
        for work in (work for work in runs[-1] if re.fullmatch(pattern, work)):
            first, now = (figures.get(work, {}).get(key) for figures in (runs[0], runs[-1]))
            least = next((b for s, w, k, b in BARS if (s, k) == (section, key) and fnmatchcase(work, w)), None)
            judged = "" if least is None else f"{least:.0%}: {'met' if now >= least else '**missed**'}"
            lines.append(f"| {title.format(work)} | {first:.1%} | {now:.1%} | {judged} |")
    where, card = result["machine"], result["runs"][0]
    versions = ", ".join(f"{name} {card['details'][name]}" for name in ("torch", "triton"))
    how = f"{where['gpu']}, {card['copy_gb_s']:.0f} GB/s of copies, {versions}"
    commits = ", ".join(run["commit"] for run in result["runs"])
    return "\n".join([*lines, "", f"{how}; {result['date'][:10]}, commits {commits}."])


GPU_ROWS = (
    ("attention", "decode attention, {}, of the copy bandwidth", "of_copy", ".*"),
    ("matmul", "4,096^3, {}, of the data sheet's dense rate", "of_dense", "w8a8|fp8"),
    ("matmul", "... {}, of torch's own", "of_torch", "bf16|w8a8|fp8"),
    ("weights", "4-bit weights, {}, of the copy bandwidth", "of_copy", ".*"),
    ("model", "8B in bf16, {}, of what reading takes", "of_floor", "decode.*"),
    ("model", "8B in bf16, {}, of the dense rate", "of_dense", "prompt.*"),
)
"""A section of gpu.py, what its figures are called, the figure, and which works have it."""

TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "cpu-peers": partial(peers, "cpu-peers"),
        "accuracy": accuracy,
        "startup": startup,
        "chat-times": chat_times,
        "serving-peers": partial(serving, "serving-peers"),
    },
    "docs/performance.md": {
        "step-profile": profile,
        "opencl-peers": partial(peers, "opencl-peers"),
        "stages": stages,
        "speculation": speculation,
        "serving-soak": soak,
        "serving-host": host,
        "embedding-peers": embeddings,
        "gpu-h200": partial(gpu, "gpu-h200"),
    },
    "docs/performance-machines.md": {
        "cpu-peers-zen4": partial(peers, "cpu-peers-zen4"),
        "cpu-peers-formats-zen4": partial(peers, "cpu-peers-formats-zen4"),
        "cpu-variants-zen4": partial(variants, "cpu-variants-zen4"),
        "cpu-peers-amx": partial(peers, "cpu-peers-amx"),
        "cpu-peers-avx2": partial(peers, "cpu-peers-avx2"),
        "serving-peers-zen4": partial(serving, "serving-peers-zen4"),
        "serving-peers-amx": partial(serving, "serving-peers-amx"),
    },
}


def page(path: Path, tables: dict[str, Callable[[], str]]) -> str:
    """The page's text with its tables anew."""
    text = path.read_text()
    for name, make in tables.items():
        block = f"<!-- table:{name} -->\n{make()}\n<!-- end -->"
        text, count = re.subn(rf"<!-- table:{name} -->.*?<!-- end -->", block.replace("\\", r"\\"), text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{path.name} has {count} places for the table {name}; it must have one.")
    return text


def main() -> None:
    for name, tables in TABLES.items():
        path = ROOT / name
        text = page(path, tables)
        if "--check" in sys.argv and text != path.read_text():
            raise SystemExit(f"{name} does not show the newest results; run benchmarks/tables.py.")
        path.write_text(text)


if __name__ == "__main__":
    main()
