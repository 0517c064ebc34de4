"""Runs commands from a process that stays small: the peak memory that wait4 reports of a child begins with that of the
process it was forked from, and pytest's is far larger than the command's.

A line of JSON in (a command), a line of JSON out: [exit status, CPU seconds, peak resident bytes, stderr].
"""

import json
import os
import sys
import tempfile

for line in sys.stdin:
    command = json.loads(line)
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            os.dup2(errors.fileno(), 2)
            os.execv(command[0], command)
        _, status, used = os.wait4(child, 0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    unit = 1 if sys.platform == "darwin" else 1024
    result = [os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss * unit, text]
    print(json.dumps(result), flush=True)
