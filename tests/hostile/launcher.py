"""Runs commands from a process that stays small: the peak memory that wait4 reports of a child begins with that of the
process it was forked from, and pytest's is far larger than the command's.

Each command is a fork that finds what commands import already there, which takes most of the time of one that is refused.

A line of JSON in (a command's arguments), a line of JSON out: [exit status, CPU seconds, peak resident bytes, stderr].
"""

import gc
import importlib
import json
import os
import sys
import tempfile

from engine.cli.main import main

for module in ("engine.cli.chat", "engine.cli.generate", "engine.runtime.llm", "engine_cpu.device", "tokenizers"):
    importlib.import_module(module)
gc.freeze()

for line in sys.stdin:
    arguments = json.loads(line)
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv = ["engine", *arguments]
            main()
        _, status, used = os.wait4(child, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    unit = 1 if sys.platform == "darwin" else 1024
    result = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * unit, text]
    print(json.dumps(result), flush=True)
