"""Cuts of products that were measured: which is taken, that each gives the answer, and the table they are kept in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from engine.backend.registry import open_device
from engine.cli.main import run
from engine.ops import OPS
from engine.testing.checkpoints import write_checkpoint
from engine.testing.checks import check_op


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Tables of cuts are a person's own."""
    return tiny_models.own_home(tmp_path / "home", monkeypatch)


@pytest.fixture
def cuts(device):
    from engine_cuda import cuts

    return cuts


@pytest.fixture
def few_ways(cuts, monkeypatch):
    """The usual way and two others, since the interpreter is slow."""
    rng = np.random.default_rng()

    def chosen(near, *given):
        usual, *others = near(*given)
        return [usual, *(others[n] for n in rng.permutation(len(others))[:2])]

    for name in ("near", "near_tiled"):
        monkeypatch.setattr(cuts, name, partial(chosen, getattr(cuts, name)))


class Clock:
    """Seconds that a launch is said to take, by its tiles; what is launched otherwise is noted."""

    def __init__(self, slow=lambda tiles: 1.0):
        self.launched, self.measured, self._slow = [], [], slow

    def start(self, tiles):
        self.launched.append(tiles)

    def __call__(self, start):
        start()
        self.measured.append(self.launched.pop())
        return self._slow(self.measured[-1])


def test_the_fastest_is_taken_and_kept(cuts, tmp_path):
    path, shape = tmp_path / "new" / "card.json", cuts.Shape("dense.bf16", 300, 4096, 512, 2)
    wanted = cuts.near(shape.usual(), 300, None)[-1]
    clock = Clock(lambda tiles: 0.5 if tiles == wanted else 1.0)
    table = cuts.Cuts({}, path, "card", clock)
    table.launch(shape, clock.start)
    assert clock.launched == [shape.usual()] and not clock.measured
    with table.tuning() as tuning:
        table.launch(shape, clock.start)
        assert clock.launched[1:] == [wanted] and clock.measured == shape.ways()
        table.launch(cuts.Shape("dense.bf16", 511, 4096, 512, 2), clock.start)  # rows up to the same power of two
        assert clock.launched[2:] == [wanted] and len(clock.measured) == len(shape.ways())
    [found] = tuning.found
    assert (found.usual_s, found.best_s, tuning.path) == (1.0, 0.5, str(path))
    assert cuts.read(path) == {shape.name: wanted}
    again = cuts.Cuts(cuts.read(path), path, "card", clock)
    with again.tuning() as tuning:
        again.launch(shape, clock.start)
        again.launch(cuts.Shape("dense.bf16", 600, 4096, 512, 2), clock.start)  # it has no figures of this one
    assert clock.launched[3] == wanted and len(tuning.found) == 1 and len(cuts.read(path)) == 2


def test_a_way_that_fails_costs_that_way_alone(cuts, tmp_path):
    """Whatever is raised: what a card refuses, and what Triton's passes and its compiler do."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    shape, clock = cuts.Shape("int8", 64, 256, 512, 1), Clock()
    errors = [
        OutOfResources(1 << 20, 1 << 17, "shared memory"),
        CompilationError("", None),
        RuntimeError("PassManager"),
    ]
    usual, *others = shape.ways()
    failed = []

    def start(tiles):
        if tiles != others[-1]:
            failed.append(tiles)
            raise errors[len(failed) % 3]
        clock.start(tiles)

    table = cuts.Cuts({}, tmp_path / "card.json", "card", clock)
    with table.tuning() as tuning:
        table.launch(shape, start)
    assert clock.launched == [others[-1]] and failed == [usual, *others[:-1]]
    [found] = tuning.found
    assert found.usual_s == float("inf") and found.what.endswith(f"; {len(others)} of {len(others) + 1} ways failed")


def test_only_where_all_ways_fail_is_it_an_error(cuts, tmp_path):
    def start(tiles):
        raise RuntimeError("an illegal address")

    table = cuts.Cuts({}, tmp_path / "card.json", "card", Clock())
    with table.tuning() as tuning, pytest.raises(RuntimeError, match="illegal"):
        table.launch(cuts.Shape("int8", 64, 256, 512, 1), start)
    assert not tuning.found and not (tmp_path / "card.json").exists()


def test_few_ways_are_worth_compiling(cuts, monkeypatch):
    """The products of a llama of 8 billion parameters are tuned within minutes, as each way takes a second to compile."""
    from engine_cuda import tiles

    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "architecture", lambda: "sm_90")
    for kernel, bytes_ in (("tiled.bf16", 2), ("tiled.int8", 1), ("dense.bf16", 2), ("int8", 1), ("codes8g32.bf16", 2)):
        for rows in (1, 64, 256, 4096):
            ways = cuts.Shape(kernel, rows, 4096, 4096, bytes_).ways()
            assert 4 < len(ways) <= 44
            assert all(one.bm * one.bn <= one.warps * 32 * 128 for one in ways[1:])


@pytest.mark.parametrize(
    ("kernel", "bytes_"), [("tiled.bf16", 2), ("tiled.e4m3", 1), ("dense.bf16", 2), ("int8", 1), ("e4m3", 1)]
)
def test_few_rows_have_enough_of_a_weight_on_its_way(cuts, monkeypatch, kernel, bytes_):
    """What 4.8 TB/s bring within 700 ns."""
    from engine_cuda import tiles

    monkeypatch.setattr(tiles, "INTERPRETED", False)
    monkeypatch.setattr(tiles, "architecture", lambda: "sm_90")
    for rows in (1, 16, 64):
        usual = cuts.Shape(kernel, rows, 4096, 14336, bytes_).usual()
        on_its_way = 4096 * (usual.stages - 1) * usual.bk * bytes_
        assert on_its_way >= (0.9 if rows == 64 else 1) * 4.8e12 * 700e-9, usual
        assert kernel != "e4m3" or usual.bk == 128
        assert not kernel.startswith("tiled.") or usual.bk <= 256  # as many as the copy engine brings
        assert 4 < len(cuts.Shape(kernel, rows, 4096, 14336, bytes_).ways()) <= 44


def test_ways_are_compiled_side_by_side_before_one_is_timed(tmp_path):
    """As on a GPU, in a process whose kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    script = Path(__file__).with_name("compiling.py")
    told = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found = json.loads(told.stdout)
    assert found["timed"] == [found["ways"]] * found["ways"] and found["ways"] > 8
    assert found["launched"] == 1 and not found["main"] and (found["threads"] > 1 or os.cpu_count() == 1)


def test_ways_keep_the_order_of_sums(cuts):
    for rows in (1, 2, 16, 17, 100, 4096):
        for outputs in (8, 64, 128256):
            for block in (None, 16, 128):
                shape = cuts.Shape("dense.bf16", rows, outputs, 4096, 2, block)
                ways = shape.ways()
                assert ways[0] == shape.usual() and len(set(ways)) == len(ways) > 4
                assert (
                    len([one for one in ways if one.bn == 32]) > 0 or rows > 32
                )  # the narrowest, as few rows take them
                assert all(tiles.bk == ways[0].bk and tiles.bm >= 16 for tiles in ways)
                assert block is None or all(tiles.bm == block for tiles in ways)


SLOW = [pytest.param(op, marks=pytest.mark.slow) for op in ("linear_group", "moe_linear", "moe_linear_group")]


@pytest.mark.parametrize("op", ["linear", "head_linear", *SLOW])
def test_every_way_gives_the_answer(cuts, few_ways, monkeypatch, op):
    """Of each shape a random one is said to be the fastest, and is used from then on."""
    rng = np.random.default_rng()
    monkeypatch.setattr(cuts, "_once", lambda start: start() or rng.random())  # some way is the fastest by chance
    device = open_device("cuda", {})
    with device.tuning() as tuning:
        check_op(device, OPS[op], rng)
    assert len(tuning.found) > 3
    assert check_op(open_device("cuda", {}), OPS[op], rng).ran  # by the table


@pytest.mark.parametrize(
    "damage",
    [b"", b"{}", b"[]", b'{"cuts": []}', b'{"cuts": {"a": 5}}', b'{"cuts": {"a": [16, 64, 64, 4]}}', b"\xff",
     b'{"cuts": {"a": [16, 64, 64, 4, 0]}}', b'{"cuts": {"a": [17, 64, 64, 4, 2]}}', b'{"cuts": {"a": [16, 1024, 64, 4, 2]}}',
     b'{"cuts": {"a": [16, 64, 64, 4, true]}}', b'{"cuts": {"a": ["16", 64, 64, 4, 2]}}'],
)  # fmt: skip
def test_a_damaged_table_is_refused(cuts, tmp_path, damage):
    path = tmp_path / "card.json"
    path.write_bytes(damage)
    with pytest.raises(ValueError, match=r"is no table of cuts .*run engine tune again\.$"):
        cuts.read(path)


@pytest.mark.parametrize("graphs", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_the_command(few_ways, tmp_path, capsys, monkeypatch, graphs):
    """It measures a model's products, once, and the model's tokens stay what they were."""
    monkeypatch.setenv("ENGINE_CUDA_GRAPHS", graphs)
    monkeypatch.setenv("ENGINE_CUDA_GRAPH_SIZES", "2,4")
    path = write_checkpoint("llama", tmp_path / "model", np.random.default_rng())
    asked = [str(path), "--backend", "cuda", "--max-context", "64"]

    def told(*arguments):
        capsys.readouterr()
        assert run([*arguments]) == 0
        return capsys.readouterr().out

    before = told("generate", *asked, "--prompt-ids", "5 6 7", "--max-tokens", "6", "--temperature", "0")
    report = json.loads(told("tune", *asked, "--rows", "1,4,16", "--json"))
    kernels = [found["what"] for found in report["kernels"]]
    assert len(set(kernels)) == len(kernels) >= 6
    rows = {kernel.partition(":")[0].rpartition(" ")[2] for kernel in kernels}
    assert rows == {"2" if graphs == "1" else "1", "4", "16"}  # one row is padded to two where steps are recorded
    assert told("generate", *asked, "--prompt-ids", "5 6 7", "--max-tokens", "6", "--temperature", "0") == before
    assert "Nothing was measured" in told("tune", *asked, "--rows", "1,4,16")


def test_a_backend_with_nothing_to_tune_says_so(tmp_path, capsys):
    path = write_checkpoint("llama", tmp_path / "model", np.random.default_rng())
    assert run(["tune", str(path), "--backend", "cpu", "--max-context", "64"]) == 2
    assert "has nothing to tune; --backend names another." in capsys.readouterr().err
