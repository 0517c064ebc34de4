"""Servers of a comparison: each a process of its own with the same threads, asked by the same client."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from sides import hf_config, vllm_environment

_START_S = 600.0  # vLLM compiles when it first starts
_STOP_S = 20.0


class ServerError(Exception):
    """A server that did not come up; says what it said last."""


@dataclass(frozen=True)
class Server:
    """How a server is started, but for its port, and what its model is called in requests."""

    name: str
    command: tuple[str, ...]
    model: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def started(self) -> Iterator[str]:
        """Its URL, once it is ready; it is stopped at the end. Raises ServerError."""
        port = _free_port()
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*self.command, "--port", str(port)],
                env={**os.environ, **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._wait(process, port, log)
                yield f"http://127.0.0.1:{port}"
            finally:
                _stop(process)

    def _wait(self, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError, URLError), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()[-3:]
        raise ServerError(f"{self.name} did not get ready: {' '.join(said) or 'it said nothing'}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return


def engine_server(model: Path, threads: int, options: Sequence[str] = ()) -> Server:
    """``engine serve`` as it is, with ``options`` of its own."""
    command = (sys.executable, "-m", "engine.cli.main", "serve", str(model), "--name", "peer")
    return Server("engine", (*command, "--backend", "cpu", "--threads", str(threads), *options), "peer")


def llama_server(folder: Path, model: Path, threads: int, slots: int, context: int) -> Server:
    """llama-server with so many slots of ``context`` tokens each, the CPU library that its build gives."""
    command = [str(folder / "bin" / "llama-server"), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["-np", str(slots), "-c", str(slots * context), "-a", "peer", "--no-webui", "--host", "127.0.0.1"]
    return Server(f"llama-server, {slots} slots", tuple(command), "peer", {"LD_LIBRARY_PATH": str(folder / "bin")})


def vllm_server(environment: Path, model: Path, threads: int, context: int) -> Server:
    """vLLM's server for the processor: the model's shape with weights of its own, in bf16, and the model's tokenizer, which
    transformers reads in vLLM's environment (that needs gguf)."""
    folder = environment / "served"  # a lasting place: what vLLM compiles it keeps by the model's path
    folder.mkdir(exist_ok=True)
    python = str(environment / "bin/python")
    settings = vllm_environment(environment, threads)
    (folder / "config.json").unlink(missing_ok=True)
    read = "import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2])"
    read += ".save_pretrained(sys.argv[3])"
    command = [python, "-c", read, str(model.parent), model.name, str(folder)]
    done = subprocess.run(command, check=False, env=settings, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"vLLM's environment cannot read the tokenizer: {done.stderr.strip().splitlines()[-1]}")
    (folder / "config.json").write_text(json.dumps(hf_config(model)))
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--load-format", "dummy"]
    command += ["--dtype", "bfloat16", "--max-model-len", str(context), "--max-num-seqs", "64", "--generation-config"]
    return Server("vLLM, bf16", (*command, "vllm", "--served-model-name", "peer"), "peer", settings)
