"""What a person waits for in a chat: the demo's first character from the start of the process, warm; and the first token of
the second turn of a long conversation, beside the same turn where no KV was kept.

usage: chat_times.py MODEL      (one with a chat template; bars: 0.5 s, and 10 times sooner)
"""

from __future__ import annotations

import argparse
import compileall
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from result import write

import engine
import engine_cpu
from engine.chat.answer import Ask
from engine.chat.local import Local, open_local

TURNS, TOKENS = 3, 3000
OPTIONS = {"temperature": 0.0, "max_tokens": 16}


def demo_first_token(times: int = 9) -> float:
    """Median seconds from the start of ``engine chat`` without a model to its first character, of compiled modules, as an
    installation has them."""
    for package in (engine, engine_cpu):
        compileall.compile_dir(Path(str(package.__file__)).parent, quiet=1)
    script = "from engine.cli.main import main; main()"  # what the console script holds
    command = [sys.executable, "-c", script, "chat", "--no-save", "-p", "hello", "--max-tokens", "1"]
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None and process.stdout.read(1), "engine chat gave nothing"
            taken.append(time.perf_counter() - start)
            process.stdout.read()
    return statistics.median(taken[1:])


def answered(local: Local, messages: list[dict[str, str]]) -> tuple[str, float]:
    """The answer's text, and seconds to its first token."""
    last = list(local.answer(Ask(messages, OPTIONS), lambda read, total: None))[-1]
    assert last.usage.first_token_s is not None
    return last.text, last.usage.first_token_s


def second_turns(model: Path) -> tuple[list[float], list[float]]:
    """Seconds to the first token of second turns, with the first turn's KV and with none of that prompt's."""
    rng = np.random.default_rng()
    kept: list[float] = []
    anew: list[float] = []
    local = open_local(model, {"max_model_len": 2 * TOKENS})
    try:
        for _ in range(TURNS):
            for times, before in ((kept, True), (anew, False)):
                text = " ".join(str(n) for n in rng.integers(0, 1000, TOKENS // 4))  # so that no prefix is shared
                first = {"role": "user", "content": text}
                said = answered(local, [first])[0] if before else "an answer"
                talk = [first, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
                times.append(answered(local, talk)[1])
    finally:
        local.close()
    return kept, anew


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    model = parser.parse_args().model
    kept, anew = second_turns(model)
    figures = {
        "model": model.name,
        "prompt_tokens": TOKENS,
        "demo_first_token_s": demo_first_token(),
        "second_turn_kept_s": statistics.median(kept),
        "second_turn_anew_s": statistics.median(anew),
        "times_sooner": statistics.median(without / with_kv for with_kv, without in zip(kept, anew, strict=True)),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    print(write("chat-times", figures))


if __name__ == "__main__":
    main()
