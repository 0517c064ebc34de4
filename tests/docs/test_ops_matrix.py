"""docs/ops.md says what the backends answer today."""

from pathlib import Path

import pytest

from engine.backend.registry import discover
from engine.testing.matrix import main

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


def test_the_page_is_what_the_backends_answer(capsys):
    text = PAGE.read_text()
    named = text.split("| op | ")[1].split(" |\n")[0].split(" | ")
    here = {backend.name for backend in discover() if backend.probe.available}
    missing = [name for name in named if name not in here]
    if missing:
        pytest.skip(f"{', '.join(missing)} cannot run here; docs/ops.md has them")
    main(named)
    made = capsys.readouterr().out
    assert made == text, "Make docs/ops.md anew: python -m engine.testing.matrix > docs/ops.md"
