"""What the backend offers, as a table; nothing here can fail but an answer that raises."""

import json

from rich.console import Console
from rich.table import Table

from engine.testing.support import as_json, support_of


def test_support(device, backend, pytestconfig, capsys):
    found = support_of(device)
    table = Table("op", "cases", "weight formats", "KV dtypes", "features", "batch-invariant", title=backend)
    for s in found:
        cells = s.cell() or "reference", " ".join(s.formats), " ".join(s.kv_dtypes), " ".join(s.features)
        table.add_row(s.op, *cells, "yes" if s.batch_invariant else "")
    with capsys.disabled():
        Console().print(table)
    path = pytestconfig.getoption("--engine-matrix")
    if path is not None:
        path.write_text(json.dumps(as_json(found), indent=1))
