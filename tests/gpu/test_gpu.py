"""benchmarks/gpu.py, which checks and measures a GPU: whole on one, and on the CPU so that it is known to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
HASTENED = (
    "import runpy, sys, triton_interpreter as t; t.hasten(); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)


def _run(*options, **environment):
    """In a process of its own: in this one kernels are interpreted."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    path = os.pathsep.join(sys.path)
    hastened = ["-c", HASTENED] if environment.get("TRITON_INTERPRET") else []
    run = subprocess.run(
        [sys.executable, *hastened, str(SCRIPT), *options],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    return json.loads(run.stdout)


def test_launching_is_not_counted_as_the_gpus_time(monkeypatch):
    """A kernel of 10 us whose op takes the host 200 us, on a GPU that writes 4.8 TB/s and is simulated."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from gpu_calls import Bench

    now = SimpleNamespace(host=0.0, gpu=0.0)  # microseconds, until which each is busy

    def launch(gpu, host):
        now.host += host
        now.gpu = max(now.gpu, now.host) + gpu

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            launch(0, 1)
            self.at = now.gpu

        def synchronize(self):
            now.host = max(now.host, self.at)

        def elapsed_time(self, end):
            return (end.at - self.at) / 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: SimpleNamespace(zero_=lambda: launch(nbytes / 4.8e6, 5)))
    monkeypatch.setattr(torch, "amax", lambda over: launch(50, 5))
    seconds = Bench(None, torch.device("cuda"), 3).seconds(lambda: launch(10, 200))
    assert seconds == pytest.approx(10e-6)


def test_a_run_that_is_ended_early_has_told_what_it_found(monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    def ended(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "SECTIONS", {"first": lambda run: {"cases": 3}, "second": ended})
    device = SimpleNamespace(describe=lambda: SimpleNamespace(name="card", details={}))
    run = SimpleNamespace(bench=SimpleNamespace(device=device), bandwidth=1e9)
    with pytest.raises(KeyboardInterrupt):
        gpu.measure(run, ["first", "second"])
    assert json.loads(capsys.readouterr().err)["first"]["cases"] == 3


def test_a_figure_that_fails_takes_nothing_from_the_others(monkeypatch):
    """Whatever of it fails first on a card that no kernel has met before."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    def decode(kv, sequences, cached):
        if kv == "int8":
            raise RuntimeError("no such instruction")
        return {"of_copy": 0.9}

    device = SimpleNamespace(describe=lambda: SimpleNamespace(name="card", details={}))
    run = SimpleNamespace(bench=SimpleNamespace(device=device), bandwidth=1e9, sizes=gpu.TINY, _decode=decode)
    monkeypatch.setattr(gpu, "SECTIONS", {"attention": gpu.Run.attention})
    found, good = gpu.measure(run, ["attention"])
    assert not good and found["attention"]["failed"] == {"int8, 2 x 530": "RuntimeError: no such instruction"}
    assert {name for name, figures in found["attention"].items() if figures == {"of_copy": 0.9}} == {
        "bf16, 2 x 530",
        "fp8, 2 x 530",
    }


def test_stdout_has_the_object_alone(monkeypatch, capsys):
    """Triton prints kernels that ptxas refuses."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    monkeypatch.setattr(gpu, "Run", lambda *_: print("a kernel"))
    monkeypatch.setattr(gpu, "measure", lambda *_: print("another") or ({"bars": []}, True))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="0"):
        gpu.main()
    told = capsys.readouterr()
    assert json.loads(told.out) == {"bars": []} and told.err == "a kernel\nanother\n"


def test_tuning_ends_when_its_time_is_over_and_says_what_is_left(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    now, done = SimpleNamespace(s=5.0), []

    def call(name):
        now.s += 40
        done.append(name)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now.s))
    left = gpu.within(60, [(name, lambda name=name: call(name)) for name in "abcd"])
    assert done == ["a", "b"] and left == {"not tuned, as the time was over": ["c", "d"]}
    assert gpu.within(60, [("e", lambda: call("e"))]) == {}


def test_a_setting_of_transformers_that_fails_takes_nothing_from_the_others(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_peers

    def rate(model, case, graphs):
        if graphs:
            raise RuntimeError("a capture failed")
        return 100.0

    model = SimpleNamespace(to=lambda where: None)
    classes = {
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda *_, **__: model),
        "ContinuousBatchingConfig": lambda use_cuda_graph, **memory: use_cuda_graph,
    }
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**classes))
    monkeypatch.setattr(gpu_peers, "_rate", rate)
    found = gpu_peers.decode_rates(Path(), ["first", "second"], torch.device("cuda", 0), torch.bfloat16)
    assert {case: figures["tok_s"] for case, figures in found.items()} == {"first": 100.0, "second": 100.0}
    assert capsys.readouterr().err.count("RuntimeError: a capture failed") == 2


def test_an_op_whose_kernel_does_not_compile_keeps_no_other_from_being_examined(monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    examined = []

    def check(device, spec, rng):
        examined.append(spec.name)
        if spec.name == "add":
            raise RuntimeError("no such instruction")
        return SimpleNamespace(ran=1)

    monkeypatch.setattr(gpu, "check_op", check)
    run = SimpleNamespace(sizes=gpu.TINY, bench=SimpleNamespace(device=None))
    with pytest.raises(AssertionError, match=r"'add': 'RuntimeError: no such instruction'"):
        gpu.Run.ops(run)
    assert examined == list(gpu.TINY.ops)


def test_a_card_whose_products_are_all_known_has_nothing_to_tune(monkeypatch, tmp_path):
    """By the table that comes with the package, so that there is none of one's own."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    tuning = gpu.Tuning(str(tmp_path / "card.json"), [])
    bench = SimpleNamespace(randn=torch.zeros, device=SimpleNamespace(tuning=lambda: nullcontext(tuning)))
    run = SimpleNamespace(bench=bench, sizes=gpu.TINY, _few_rows=lambda: [], _tuning=gpu.Run._tuning)
    assert gpu.Run.tune(run) == {"table": {}}


def test_only_one_row_of_a_prompt_is_counted_as_multiplied_with_the_head(monkeypatch, tmp_path):
    """It is a fifteenth of the weights."""
    pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_model

    folder = gpu_model.write_model(tmp_path, 2, True)
    embeddings, layers = 320 * 64, 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)
    assert gpu_model.embedding_bytes(folder) == 2 * embeddings
    operations = gpu_model.prompt_operations(folder, 2 * (layers + embeddings), 20)
    assert operations == 2 * 20 * layers + 2 * embeddings


@pytest.mark.slow
def test_it_runs_on_the_cpu(tmp_path):
    found = _run(
        "--sizes", "tiny", TRITON_INTERPRET="1", ENGINE_CUDA_GRAPHS="1", ENGINE_CUDA_GRAPH_SIZES="1,2",
        XDG_DATA_HOME=str(tmp_path),
    )  # fmt: skip
    assert found["ops"]["cases"] > 0 and "interpreter" in found["device"]
    for section in ("attention", "matmul", "weights", "swap", "model"):
        figures = [value for key, value in found[section].items() if isinstance(value, dict) and key != "tuned"]
        assert figures and all(number > 0 for figure in figures for number in figure.values()), section
    assert any("fp8" in name for name in found["attention"]) and "launched again" in found["model"]["graphs"]
    assert all(
        figures["by_transformers"] > 0 for name, figures in found["peers"].items() if name in ("1 x 16", "2 x 16")
    )
    assert {"1 x 16", "2 x 16", "setting, 2 x 16"} <= found["peers"].keys()
    tuned, table = found["tune"], found["tune"]["table"]["cuts"]
    assert len(table) == 4 and all(any(what.startswith(name) for what in tuned) for name in table)
    assert {what.partition(":")[0].rpartition(" ")[2] for what in found["model"]["tuned"]} == {"1", "2", "32"}
    assert 0 < found["matmul"]["w8a8"]["of_torch"] < 1 and "of_dense" not in found["matmul"]["w8a8"]
    assert found["bars"] and not any(bar["met"] for bar in found["bars"])


@pytest.mark.gpu
@pytest.mark.timeout(1800)  # of which some minutes are for compiling several hundred kernels
def test_every_section_on_a_gpu():
    """That all answers are right; what the bars say is for the reader of the figures."""
    from engine.backend.registry import discover

    backend = next((b.name for b in discover() if b.name in ("cuda", "rocm") and b.probe.available), None)
    if backend is None:
        pytest.skip("no GPU is here")
    found = _run("--backend", backend)
    print(json.dumps(found, indent=1))
