"""``engine bench-serve``: its figures are what the server did."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

from engine.cli.main import run
from engine.errors import UsageError
from engine.serve.bench.client import Answer, Target
from engine.serve.bench.load import arrivals, conversation_asks, random_asks
from engine.serve.bench.plot import drawn
from engine.serve.bench.report import goals, summary

SVG = "{http://www.w3.org/2000/svg}"


def measured(capsys, *arguments):
    assert run(["bench-serve", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_random_prompts_at_several_rates(running, capsys):
    before = running.http.get("/metrics").text
    assert before
    flags = [
        "--num-prompts",
        12,
        "--random-input-len",
        20,
        "--random-output-len",
        40,
        "--vocab",
        300,
        "--request-rate",
        "inf,60",
    ]
    report = measured(capsys, running.url, *flags, "--goodput", "ttft:60000", "--goodput", "e2el:60000")
    assert report["model"] == "tiny" and [r["rate"] for r in report["results"]] == ["inf", 60.0]
    for result in report["results"]:
        assert (result["completed"], result["failed"], result["failures"]) == (12, 0, {})
        assert (result["prompt_tokens"], result["output_tokens"]) == (12 * 20, 12 * 40)
        assert result["cached_tokens"] == 0  # each rate has prompts of its own
        assert result["request_throughput"] == pytest.approx(12 / result["duration_s"])
        assert result["goodput"] == pytest.approx(result["request_throughput"])
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
            assert 0 <= result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
        # A server that is quick may send a whole answer in one piece.
        assert result["ttft_ms"]["p50"] <= result["e2el_ms"]["p50"] <= result["duration_s"] * 1e3
    assert report["results"][1]["duration_s"] > 11 / 60 * 0.3


def test_conversations_by_chat_and_few_at_a_time(running, talker, tmp_path, capsys):
    file = tmp_path / "talks.json"
    talks = [
        {"conversations": [{"value": f"Hello {n}"}, {"value": "There you are." * n}, {"value": "x"}]}
        for n in range(1, 9)
    ]
    file.write_text(json.dumps([*talks, {"conversations": []}]))
    flags = [
        "--dataset-path",
        file,
        "--tokenizer",
        talker,
        "--num-prompts",
        6,
        "--chat",
        "--max-concurrency",
        2,
        "--scale",
        0.5,
    ]
    [result] = measured(capsys, running.url, *flags)["results"]
    assert result["completed"] == 6 and result["output_tokens"] > 6
    assert run(["bench-serve", running.url, *map(str, flags), "--num-prompts", "99"]) == 2
    assert "has 8 conversations" in capsys.readouterr().err


def marks(figure, panel):
    """Lines of a panel by label: how many points each has that are drawn."""
    return {line.get_label(): np.isfinite(line.get_ydata()).sum() for line in figure.axes[panel].get_lines()}


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_a_sweep_over_rates_is_drawn(running, tmp_path, capsys, kind, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    file = tmp_path / f"rates.{kind}"
    flags = ["--num-prompts", 4, "--random-input-len", 9, "--random-output-len", 5, "--vocab", 300]
    report = measured(capsys, running.url, *flags, "--request-rate", "80,inf,40", "--plot", file)
    assert [r["rate"] for r in report["results"]] == [80.0, "inf", 40.0]
    if kind == "png":
        pixels = matplotlib.image.imread(file)
        assert pixels.ndim == 3 and len({tuple(p) for p in pixels.reshape(-1, pixels.shape[2])[::97]}) > 3
        return
    texts = ["".join(element.itertext()).strip() for element in ElementTree.parse(file).iter(f"{SVG}text")]
    for name in ("requests/s", "tokens/s", "good", "output", "p50", "p90", "p99", "goal", "40.0", "80.0", "inf"):
        assert name in texts
    assert {"TTFT", "TPOT", "ITL", "E2EL"} <= {text.partition(":")[0] for text in texts}


def test_a_drawing_has_every_figure():
    """Lines as they are drawn: at each rate what the report has, and a gap where it has nothing."""
    times = [Answer(0.0, 200, "", [n / 4, n / 2, n], n, prompt_tokens=7, output_tokens=3) for n in (1, 2, 3)]
    short = [Answer(0.0, 200, "", [0.5], 0.5, prompt_tokens=7, output_tokens=1)]
    results = [{"rate": "inf", **summary(short, 1.0, goals([]))}, {"rate": 2.0, **summary(times, 3.0, goals([]))}]
    figure = drawn({"model": "m", "num_prompts": 3, "results": results})
    assert [marks(figure, n) for n in (0, 1)] == [{"completed": 2, "good": 2}, {"output": 2, "prompt and output": 2}]
    assert marks(figure, 2) == {"p50": 2, "p90": 2, "p99": 2, "goal": 2}
    assert marks(figure, 3) == {"p50": 1, "p90": 1, "p99": 1, "goal": 2}  # of one token there is no time per token
    completed, median = figure.axes[0].get_lines()[0], figure.axes[2].get_lines()[0]
    assert completed.get_xdata()[0] == 2.0 < completed.get_xdata()[1]
    assert list(completed.get_ydata()) == [1.0, 1.0] and list(median.get_ydata()) == [500.0, 500.0]


def test_a_plot_without_its_package(running, tmp_path):
    """Before anything is sent, and in one sentence."""
    hidden = (
        "import sys; sys.modules['matplotlib'] = None; from engine.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    file = tmp_path / "x.png"
    ran = subprocess.run(
        [sys.executable, "-c", hidden, "bench-serve", running.url, "--plot", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2 and "engine[bench]" in ran.stderr and ran.stderr.count("\n") == 1
    assert not file.exists()


def test_a_table_for_people(running, capsys):
    assert run(["bench-serve", running.url, "--num-prompts", "3", "--vocab", "300", "--random-output-len", "3"]) == 0
    out = capsys.readouterr().out
    assert "TTFT" in out and "output" in out


def test_a_table_for_a_file_leaves_nothing_out(capsys, monkeypatch):
    from engine.cli.bench_serve import _print_tables

    monkeypatch.setenv("COLUMNS", "40")
    names = ("request_throughput", "output_throughput", "total_token_throughput", "goodput")
    result = {"rate": 1.0, "completed": 200, "failed": 0, **dict.fromkeys(names, 123456.789), "peak_concurrency": 64}
    times = dict.fromkeys(("mean", "p50", "p90", "p99"), 12345.6)
    _print_tables([{**result, "failures": {}, **{f"{name}_ms": times for name in ("ttft", "tpot", "itl", "e2el")}}])
    out = capsys.readouterr().out
    assert "…" not in out and "output tok/s" in out and out.count("123456.79") == 4 and out.count("12345.6") == 16


def test_refusals_are_counted(start, capsys):
    running = start(max_num_seqs=1, max_model_len=16384, kv_cache_tokens=16384, options={"max_queue": 1})
    flags = ["--num-prompts", 8, "--random-input-len", 5, "--random-output-len", 400, "--vocab", 300]
    [result] = measured(capsys, running.url, *flags)["results"]
    assert result["completed"] + result["failed"] == 8
    assert result["failures"] == {"429": result["failed"]} and result["failed"] >= 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--request-rate", "0"],
        ["--request-rate", "x"],
        ["--chat"],
        ["--goodput", "ttft"],
        ["--goodput", "itl:5"],
        ["--vocab", "9"],
        ["--vocab", str(1 << 70)],
        ["--num-prompts", str(1 << 70)],
        ["--random-input-len", str(1 << 70)],
        ["--random-output-len", str(1 << 70)],
        ["--plot", "x.pdf"],
        ["--plot", "no/such/folder.png"],
    ],
)
def test_wrong_usage(running, capsys, flags):
    assert run(["bench-serve", running.url, *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_is_not_there(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert run(["bench-serve", f"http://127.0.0.1:{port}", "--model", "x", "--num-prompts", "2"]) == 2
    assert "Every request failed; the first: ConnectionRefusedError: " in capsys.readouterr().err


def test_an_address_that_is_none_is_told_without_an_option_of_the_chat(capsys):
    assert run(["bench-serve", ""]) == 2
    said = capsys.readouterr().err
    assert "must be a server's URL" in said and "--attach" not in said


def test_a_model_that_is_not_there_is_the_server_s_sentence(running, capsys):
    assert run(["bench-serve", running.url, "--model", "nobody", "--num-prompts", "2"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("engine: Every request failed; the first: 404, ") and "{" not in said and "'nobody'" in said
    ), said


def test_figures_are_those_of_the_times():
    """One request of 5 tokens from 1 s on, one of a single token, one that failed."""
    a = Answer(10.0, 200, "", [11.0, 11.5, 11.5, 12.0, 13.0], 13.0, prompt_tokens=7, output_tokens=5)
    b = Answer(10.5, 200, "", [10.75], 10.75, prompt_tokens=3, output_tokens=1)
    c = Answer(12.5, 429, "full", [], 12.6)
    found = summary([a, b, c], 4.0, {"ttft": 500.0})
    assert (found["completed"], found["failed"], found["failures"]) == (2, 1, {"429": 1})
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (0.5, 1.5, 4.0)
    assert found["goodput"] == 0.25
    assert found["peak_concurrency"] == 2
    assert found["ttft_ms"]["mean"] == pytest.approx(625)
    assert found["tpot_ms"]["p99"] == pytest.approx(500)
    assert found["itl_ms"]["p50"] == pytest.approx(500) and found["itl_ms"]["mean"] == pytest.approx(500)
    assert found["e2el_ms"]["mean"] == pytest.approx((3000 + 250) / 2)
    assert summary([a], 1.0, goals([]))["goodput"] == 0.0  # 500 ms a token


def test_arrivals_and_lengths():
    rng = np.random.default_rng()
    assert arrivals(rng, 5, float("inf"), 1.0) == [0.0] * 5
    for burstiness in (0.2, 1.0, 5.0):
        times = arrivals(rng, 400, 20.0, burstiness)
        assert times[0] == 0 and times == sorted(times) and 10 < times[-1] <= 20
        gaps = np.diff(times)
        assert (gaps.std() / gaps.mean() > 1.4) == (burstiness == 0.2)
        assert (gaps.std() / gaps.mean() < 0.7) == (burstiness == 5.0)
    asks = random_asks(rng, 300, (10, 20), 0.5, 500)
    assert {len(ask.prompt) for ask in asks} == set(range(5, 16))
    assert {ask.output_tokens for ask in asks} <= set(range(10, 31))
    assert all(100 <= token < 500 for ask in asks for token in ask.prompt)


def test_files_that_are_no_conversations(tmp_path):
    for text in ("", "{}", "[1]", '[{"conversations": [1, 2]}]', '[{"conversations": [{"from": "x"}, {}]}]'):
        file = tmp_path / "file.json"
        file.write_text(text)
        with pytest.raises(UsageError):
            conversation_asks(np.random.default_rng(), 1, file, None, 1.0, 100)


def test_chunks_may_cut_events_anywhere():
    """A server that sends each byte of its events as a chunk of its own."""
    thought = '{"choices": [{"delta": {"reasoning": "b", "content": null}}]}'  # as vLLM and others have it
    pieces = ['{"choices": [{"text": "ä"}]}', thought, '{"choices": [], "usage": {"completion_tokens": 4}}', "[DONE]"]
    events = "".join(f"data: {piece}\r\n\n" for piece in pieces)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                while b"}" not in client.recv(4096):
                    pass
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                body = b"".join(b"1\r\n%c\r\n" % byte for byte in events.encode())
                client.sendall(head + body + b"0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        target = Target(f"127.0.0.1:{listening.getsockname()[1]}/v1", "/v1/completions")
        answer = asyncio.run(target.ask({"x": 1}, 60.0))
        thread.join()
    assert (answer.status, answer.error, len(answer.times), answer.output_tokens) == (200, "", 2, 4)
