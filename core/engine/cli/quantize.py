"""``engine quantize``: a checkpoint with fewer bits a weight."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from engine.console.notes import note
from engine.console.opening import find_model
from engine.console.options import Model
from engine.console.progress import Wait
from engine.errors import UsageError

if TYPE_CHECKING:
    from engine.formats import Checkpoint
    from engine.quantize.to_gguf import Result


def quantize(
    model: Model,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write; for NF4 and INT8 a folder.")],
    *,
    type_name: Annotated[
        str, typer.Option("--type", "-t", metavar="TYPE", help="Q4_K_M, Q8_0, Q6_K, Q4_0, NF4, INT8 and others.")
    ],
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weigh errors by this importance matrix (engine imatrix).")
    ] = None,
    double_quant: Annotated[bool, typer.Option("--double-quant", help="NF4: keep the scales in 8 bits, too.")] = False,
    shard_size: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="NF4 and INT8: most GB of a safetensors file; 5 if not given."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="GGUF: threads; all cores if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a model with fewer bits a weight.

    Types of GGUF files, most bits first: F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS
    MXFP4 Q3_K_L Q3_K_M Q3_K_S Q2_K Q2_K_S. Of Hugging Face folders: NF4 (bitsandbytes) and INT8 (compressed-tensors, 8-bit
    activations). A GGUF comes from either kind of checkpoint, a folder from a folder.

    \b
    Examples:
      engine quantize Qwen3-0.6B/ qwen3-q4_k_m.gguf --type Q4_K_M
      engine quantize model-f16.gguf model-q3_k_m.gguf --type Q3_K_M --imatrix imatrix.gguf
    """
    from engine.formats import open_checkpoint

    wanted = type_name.upper()
    _refuse_idle(wanted, imatrix, double_quant, shard_size, threads)
    path = find_model(model)
    start = time.monotonic()
    with _ending_as_by_ctrl_c(), Wait("Quantizing") as wait:
        checkpoint = open_checkpoint(path)
        if wanted in _FOLDERS:
            size = _SHARD_GB if shard_size is None else shard_size
            result = _to_folder(checkpoint, output, wanted, double_quant, size, force, wait)
        else:
            result = _to_gguf(checkpoint, output, wanted, imatrix, threads, force, wait)
    for notice in result.notices:
        note(notice)
    sizes = f"{result.before / 1e6:.1f} MB of weights became {result.after / 1e6:.1f} MB"
    print(f"{output}: {sizes} in {time.monotonic() - start:.1f} s")


@contextmanager
def _ending_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM and a closed terminal end it by an exception, too, so that no half of a file is left."""

    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    ours = [kind for kind in kinds if signal.getsignal(kind) is signal.SIG_DFL]  # nohup ignores one
    for kind in ours:
        signal.signal(kind, end)
    try:
        yield
    finally:
        for kind in ours:
            signal.signal(kind, signal.SIG_DFL)


_FOLDERS = ("NF4", "INT8")
_SHARD_GB = 5.0


def _refuse_idle(
    type_name: str, imatrix: Path | None, double_quant: bool, shard_size: float | None, threads: int | None
) -> None:
    """Options that would change nothing."""
    folder = type_name in _FOLDERS
    idle = {
        "--imatrix": folder and imatrix is not None,
        "--threads": folder and threads is not None,
        "--shard-size": not folder and shard_size is not None,
        "--double-quant": type_name != "NF4" and double_quant,
    }
    for option, given in idle.items():
        if given:
            raise UsageError(f"{option} is nothing for {type_name}; leave it out.")


def _to_gguf(
    checkpoint: Checkpoint,
    out: Path,
    type_name: str,
    imatrix: Path | None,
    threads: int | None,
    force: bool,
    wait: Wait,
) -> Result:
    from engine.quantize.imatrix import read_imatrix
    from engine.quantize.mix import quant_type
    from engine.quantize.to_gguf import quantize_to_gguf

    kind = quant_type(type_name)
    importance = None if imatrix is None else read_imatrix(imatrix)
    return quantize_to_gguf(checkpoint, out, kind, importance, threads, force, wait.update)


def _to_folder(
    checkpoint: Checkpoint,
    out: Path,
    type_name: str,
    nested: bool,
    shard_size: float,
    force: bool,
    wait: Wait,
) -> Result:
    from engine.quantize.to_folder import quantize_to_folder

    kind: Literal["NF4", "INT8"] = "NF4" if type_name == "NF4" else "INT8"
    return quantize_to_folder(checkpoint, out, kind, nested, int(shard_size * 1e9), force, wait.update)
