"""Errors of ``engine quantize`` against those of llama-quantize, for each type, and whether llama.cpp loads what we write.

usage: quantize_peers.py PEER_DIR TEXT MODEL.gguf [MODEL.gguf ...] [--types Q4_K_M,...] [--threads 2]
PEER_DIR is what build_llama_cpp.sh made, with llama-quantize. MODEL is F32 or F16. For each type, without and with an importance
matrix (of TEXT, by ``engine imatrix``; both programs read the same file): the mean squared error of each tensor's weights, with
the matrix weighted by it, as ours over theirs; the error of the logits of both files, computed by llama.cpp, over those of MODEL;
and the time. ``--heavy`` also measures a copy of the last MODEL with heavy-tailed weights (Student's t, 4 degrees of freedom) and
columns of different sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from result import write

from engine.formats import open_checkpoint
from engine.formats.gguf_writer import Header, TensorInfo
from engine.quantize.collect import collect
from engine.quantize.imatrix import Importance, write_imatrix
from engine.quantize.mix import TYPES, quant_type
from engine.quantize.to_gguf import quantize_to_gguf

Array = np.ndarray[Any, np.dtype[Any]]
LENGTH, PROMPTS = 64, 3


def heavy_tailed(source: Path, out: Path) -> Path:
    """The model with other random matrices."""
    rng, opened = np.random.default_rng(1), open_checkpoint(source)
    metadata: Any = opened.metadata
    infos = [TensorInfo(tensor.name, tensor.shape, tensor.format.name) for tensor in opened.tensors.values()]
    header = Header({key: metadata.encoded(key) for key in metadata}, infos)
    with out.open("wb") as file:
        file.write(header.encode())
        for info, tensor in zip(infos, opened.tensors.values(), strict=True):
            values = tensor.dense()
            if values.ndim > 1:
                columns = rng.lognormal(0, 0.5, values.shape[-1])
                values = (rng.standard_t(4, values.shape) * columns * 0.5 / values.shape[-1] ** 0.5).astype(np.float32)
            assert tensor.format.encode is not None
            file.write(tensor.format.encode(values).tobytes())
            file.write(bytes(header.padded(info.nbytes) - info.nbytes))
    return out


def errors(source: Path, coded: Path, importance: Importance | None) -> dict[str, float]:
    """Mean squared error of each quantized tensor, weighted where there is an importance."""
    found, before = {}, open_checkpoint(source)
    for name, tensor in open_checkpoint(coded).tensors.items():
        if tensor.format.block == 1:
            continue
        wrong = (tensor.dense() - before.tensors[name].dense()) ** 2
        weight = None if importance is None else importance.of(name, tensor.shape)
        if weight is not None:
            wrong = wrong * (weight if weight.ndim == 1 else weight[:, None])
        found[name] = float(wrong.mean(dtype=np.float64))
    return found


def logits(model: Path, prompts: Path, peer: Path, threads: int) -> Array:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npz"
        script = Path(__file__).parent / "llama_logits.py"
        command: list[str | Path] = [
            peer / "venv/bin/python",
            script,
            model,
            prompts,
            out,
            str(threads),
            "f32",
            "prefill",
        ]
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(peer / "bin"), "PYTHONPATH": ""}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        return np.concatenate([array for name, array in np.load(out).items() if name.startswith("prefill")])


def measure(model: Path, text: str, types: list[str], peer: Path, threads: int, work: Path) -> list[dict[str, Any]]:
    source, cases = open_checkpoint(model), []
    ids = source.tokenizer().encode(text)[: LENGTH * PROMPTS]
    prompts = work / "prompts.json"
    prompts.write_text(json.dumps([ids[n : n + LENGTH] for n in range(0, len(ids), LENGTH)]))
    exact = logits(model, prompts, peer, threads)
    found = collect(model, text, "text", 256, work / "imatrix.gguf", backend="cpu", threads=threads)
    write_imatrix(found)
    for name in types:
        for importance in (None, found):
            if name == "Q2_K_S" and importance is None:
                continue  # llama-quantize refuses it
            case = compare(model, name, importance, exact, prompts, peer, threads, work)
            cases.append({"model": model.name, **case})
            print(json.dumps(cases[-1]), flush=True)
    return cases


def compare(
    model: Path,
    name: str,
    importance: Importance | None,
    exact: Array,
    prompts: Path,
    peer: Path,
    threads: int,
    work: Path,
) -> dict[str, Any]:
    ours, theirs = work / "ours.gguf", work / "theirs.gguf"
    start = time.perf_counter()
    quantize_to_gguf(open_checkpoint(model), ours, quant_type(name), importance, threads, force=True)
    own_time = time.perf_counter() - start
    options: list[str | Path] = [] if importance is None else ["--imatrix", importance.path]
    command: list[str | Path] = [peer / "bin/llama-quantize", *options, model, theirs, name, str(threads)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(peer / "bin")}
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment, capture_output=True)
    peer_time = time.perf_counter() - start
    formats = [{n: t.format.name for n, t in open_checkpoint(path).tensors.items()} for path in (ours, theirs)]
    own, other = errors(model, ours, importance), errors(model, theirs, importance)
    ratios = {n: own[n] / other[n] for n in own if formats[0][n] == formats[1][n] and other[n] > 0}
    plain = [errors(model, path, None) for path in (ours, theirs)]
    rms = [float(np.sqrt(np.mean((logits(path, prompts, peer, threads) - exact) ** 2))) for path in (ours, theirs)]
    return {
        "type": name,
        "imatrix": importance is not None,
        "same_formats": formats[0] == formats[1],
        "weights_worst": max(ratios.values(), default=None),
        "weights_median": float(np.median(list(ratios.values()))) if ratios else None,
        "weights_unweighted_worst": max(plain[0][n] / plain[1][n] for n in ratios) if ratios else None,
        "logits": {"engine": rms[0], "llama.cpp": rms[1], "ratio": rms[0] / rms[1] if rms[1] else None},
        "seconds": {"engine": own_time, "llama.cpp": peer_time},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument(
        "--types", default=",".join(name for name in TYPES if name not in ("F32", "F16", "BF16", "MXFP4"))
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heavy", action="store_true")
    args = parser.parse_args()
    text = args.text.read_bytes()[:20_000].decode("utf-8", "ignore")
    with tempfile.TemporaryDirectory() as folder:
        models = list(args.models)
        if args.heavy:
            models.append(heavy_tailed(models[-1], Path(folder) / f"heavy-{models[-1].name}"))
        cases = [
            case
            for model in models
            for case in measure(model, text, args.types.split(","), args.peer, args.threads, Path(folder))
        ]
    print(write("quantize-peers", {"threads": args.threads, "cases": cases}))


if __name__ == "__main__":
    main()
