"""Tables on stdout."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 1000  # columns where there is no terminal to fill: nothing is left out of what a file or a program gets


def print_table(table: Table) -> None:
    from rich.console import Console

    Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _WIDE).print(table)
