"""The variants of another architecture are chosen by what its processor has."""

import os
import subprocess

import emulator
import pytest


def chosen(isa: str, forced: str = "") -> str:
    """The variant in use and those that can run, on the processor of ``isa``."""
    environment = {**os.environ, "ENGINE_CPU_ISA": forced}
    command = [*emulator.command(isa), "isa"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(not emulator.ISAS, reason="these variants run by themselves here")
def test_neon_variants_are_chosen_by_the_processor() -> None:
    assert chosen("neon") == "neon: neon"
    assert chosen("neon_dot") == "neon_dot: neon_dot neon"
    assert chosen("neon_dot", forced="neon") == "neon: neon_dot neon"
    refused = "refused: ENGINE_CPU_ISA is '{}', and this machine can run: {}."
    assert chosen("neon", forced="neon_dot") == refused.format("neon_dot", "neon")
    assert chosen("neon_dot", forced="avx2") == refused.format("avx2", "neon_dot, neon")
