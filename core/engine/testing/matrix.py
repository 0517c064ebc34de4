"""``python -m engine.testing.matrix [BACKEND ...] > docs/ops.md``: the matrix of ops of the backends that are here."""

from __future__ import annotations

import sys

from ..backend.registry import discover, open_device
from .support import matrix, support_of


def main(names: list[str]) -> None:
    chosen = names or [b.name for b in discover() if b.automatic and b.name != "reference"]
    print(matrix({name: support_of(open_device(name, {})) for name in sorted(chosen)}), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
