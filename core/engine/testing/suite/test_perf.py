"""Times, each as its share of what the device can do, and where a model's time goes."""

import pytest
from rich.console import Console
from rich.table import Table

from engine.testing import perf
from engine.testing.cases import formats
from engine.testing.checkpoints import write_checkpoint
from engine.testing.ladder import climb


@pytest.fixture
def told(capsys):
    """Shows a line at once."""

    def told(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    told("")
    return told


def test_shares_of_the_limits(device, backend, rng, told, capsys):
    plain = perf.measure(device, perf.plain_works(rng), told)
    assert any(t.seconds for t in plain), (
        "neither add nor linear runs on this device, so it has no limits to compare with."
    )
    limits = perf.limits_of(plain)
    rows = perf.as_rows(limits, perf.measure(device, perf.all_works(rng, formats()), told))
    title = f"{backend}: {limits.bandwidth / 1e9:.1f} GB/s, {limits.rate / 1e9:.0f} GOP/s measured"
    table = Table(*rows[0], title=title)
    for row in rows[1:]:
        table.add_row(*row)
    with capsys.disabled():
        Console().print(table)


def test_the_ladder(backend, pytestconfig, tmp_path, rng, told, capsys):
    model = pytestconfig.getoption("--engine-model") or write_checkpoint("llama", tmp_path / "llama", rng)
    told(f"An answer of {model}, op by op")
    spent = climb(model, backend, rng.integers(3, 200, 32).tolist())
    with capsys.disabled():
        Console().print("\n".join(["", *spent.lines()]))
