"""Programs that fork, or bound what they get of the system, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

FORK = """
import os, signal
child = os.fork()
who = "parent" if child else "child"
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    signal.alarm(30)  # should it hang
"""
"""Divides a program: what follows runs as ``who``, in the child to the interpreter's end, and then in the parent."""


def ran(program: str) -> list[str]:
    """The lines that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
