"""The pytest plugin: ``pytest --engine-backend NAME --mode support|test|perf|fuzz [--engine-seed N] [--engine-model PATH]``,
or ``pytest --engine-collectives NAME``.

Without test files on the command line it runs the kit's own suite. Cases are random; each report names the seed that gives
them again.
"""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

MODES = ("support", "test", "perf", "fuzz")
SUITE = Path(__file__).parent / "suite"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engine", "conformance of backends of engine")
    group.addoption("--engine-backend", metavar="NAME", help="the backend to examine")
    group.addoption("--engine-collectives", metavar="NAME", help="the collectives over host arrays to examine")
    group.addoption("--mode", choices=MODES, default="test", help="what to examine: " + ", ".join(MODES))
    about = "an option of the device, in whole programs, too"
    group.addoption("--engine-option", action="append", type=_option, default=[], metavar="KEY=JSON", help=about)
    group.addoption("--engine-seed", type=int, help="the seed of an earlier run")
    group.addoption("--engine-seconds", type=float, default=30.0, help="how long --mode fuzz goes on")
    group.addoption("--engine-model", type=Path, help="a model for --mode perf")
    group.addoption("--engine-matrix", type=Path, metavar="FILE", help="where --mode support writes its table as JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    known = early_config.known_args_namespace
    if (known.engine_backend or known.engine_collectives) and not known.file_or_dir:
        args.append(str(SUITE))


def device_options(config: pytest.Config) -> dict[str, Any]:
    """The device's options as the command line gives them."""
    return dict(config.getoption("--engine-option"))


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        found = json.loads(value)
    except ValueError:
        key = ""
    if not key:
        raise ArgumentTypeError(f"{text!r} must be KEY=JSON, such as threads=2 or dtype='\"bf16\"'.")
    return key, found
