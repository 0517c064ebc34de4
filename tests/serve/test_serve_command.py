"""The command itself, and what else of the engine talks with a server."""

from __future__ import annotations

import io
import logging
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack

import httpx
import pytest
import tiny_models

from engine.chat.answer import Ask
from engine.chat.remote import Remote
from engine.cli.main import run
from engine.cli.serve import _configs
from engine.console.options import EngineOptions
from engine.errors import UsageError
from engine.sampling import StructuredOutputs
from engine.serve.models_file import Named
from engine.serve.run import _open as open_model
from engine.serve.run import listen
from engine.serve.settings import LoadOptions, ServeOptions


def test_the_chat_attaches(running):
    remote = Remote(running.url)
    assert (remote.name, remote.limit) == ("tiny", 1024)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    ask = Ask(messages, {"max_tokens": 12, "temperature": 0.0, "seed": 3, "min_p": 0.1})
    *_, last = remote.answer(ask, lambda done, total: None)
    assert last.finish_reason == "length" and len(last.shown) == 12
    assert (last.usage.answer_tokens, last.usage.cached_tokens) == (12, 0)
    form = StructuredOutputs(regex="[a-c]{4}")
    *_, last = remote.answer(Ask(messages, {"max_tokens": 12}, form), lambda done, total: None)
    assert len(last.text) == 4 and last.finish_reason == "stop"


def _chatted(monkeypatch, capsys, tmp_path, given, *arguments):
    """What engine chat wrote with these lines piped in: answers, and notes."""
    tiny_models.own_home(tmp_path / "home", monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8"))
    capsys.readouterr()
    assert run(["chat", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr()


@pytest.mark.parametrize(("how", "said"), [("drop", "no longer sees the"), ("summarize", "sees this summary in place")])
def test_an_attached_chat_goes_on_where_the_context_is_full(running, monkeypatch, capsys, tmp_path, how, said):
    lines = "".join(f"{n} {'b' * 150}\n" for n in range(12))
    arguments = ("--attach", running.url, "--context-full", how, "--max-tokens", "20", "--temperature", "0")
    out, err = _chatted(monkeypatch, capsys, tmp_path, lines, *arguments)
    assert said in err and len(out.splitlines()) == 12


def test_an_attached_chat_leaves_sampling_to_the_server(start, talker, monkeypatch, capsys, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(talker, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    url = start(folder).url
    arguments = ("--attach", url, "--max-tokens", "12")
    greedy = {_chatted(monkeypatch, capsys, tmp_path, "hello\n", *arguments).out for _ in range(3)}
    assert len(greedy) == 1
    drawn = {_chatted(monkeypatch, capsys, tmp_path, "hello\n", *arguments, "--temperature", "1").out for _ in range(3)}
    assert drawn != greedy


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_one_sentence_says_so(talker, monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["serve", str(talker)]) == 2
    assert (
        capsys.readouterr().err
        == f"engine: {package} is not installed; install the extra serve: pip install 'engine[serve]'.\n"
    )


def test_help_imports_no_server():
    code = (
        "import sys, engine.cli.main as m; m.run(['serve', '--help'])\n"
        "print({'fastapi', 'uvicorn', 'prometheus_client'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "--max-queue" in done.stdout and done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    "flags",
    [["--port", "70000"], ["--max-queue", "-1"], ["--deadline", "0"], ["--max-seqs", "0"], ["--key-file", "none"]],
)
def test_wrong_settings_are_refused_in_a_line(talker, capsys, flags):
    assert run(["serve", str(talker), "--port", "0", "--backend", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("engine: ") and err.count("\n") == 1


def test_the_server_takes_all_the_files_it_may():
    """In a process of its own, whose soft limit is low."""
    code = (
        "import resource as r; from engine.serve.run import raise_file_limit as f; n = r.RLIMIT_NOFILE\n"
        "r.setrlimit(n, (64, r.getrlimit(n)[1])); f(); print(len(set(r.getrlimit(n))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1\n"


def test_an_address_that_is_taken(talker, running, capsys):
    port = running.url.rsplit(":", 1)[1]
    assert run(["serve", str(talker), "--port", port]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_logs_hold_no_prompt(running, caplog):
    """Neither the server's own log nor that of a library below it."""
    with caplog.at_level(logging.DEBUG), running.http as http:
        for body in ({"prompt": "a secret", "max_tokens": 2}, {"prompt": "a secret", "wrong": "a secret"}):
            http.post("/v1/completions", json=body)
        running.wait_until_logged(status=400)
    assert "a secret" not in caplog.text and "a secret" not in str(running.logs)


def test_a_log_that_nobody_reads_any_more(talker):
    """The server answers, and shuts down in order."""
    command = [sys.executable, "-c", "from engine.cli.main import main; main()", "serve", str(talker), "--port", "0"]
    with subprocess.Popen(
        [*command, "--backend", "cpu", "--name", "tiny"], stderr=subprocess.PIPE, text=True
    ) as process:
        url = next(line.split()[-1] for line in process.stderr if "Serving " in line)
        process.stderr.close()
        for _ in range(3):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=60)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2
        process.terminate()
        assert process.wait(30) == 0


def test_without_a_model_the_demo_is_served():
    """And answers with the sampling that its makers recommend."""
    command = [
        sys.executable,
        "-c",
        "from engine.cli.main import main; main()",
        "serve",
        "--port",
        "0",
        "--backend",
        "cpu",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        said = []
        for line in process.stderr:
            said.append(line)
            if "Serving " in line:
                break
        assert said[0].startswith("engine: No model is given, so this is the small built-in demo;")
        ask = {"messages": [{"role": "user", "content": "what are you?"}]}
        answer = httpx.post(f"{said[-1].split()[-1]}/v1/chat/completions", json={"model": "demo", **ask}, timeout=60)
        assert "demo" in answer.json()["choices"][0]["message"]["content"]
        process.terminate()
        process.stderr.read()
        assert process.wait(30) == 0


def test_a_server_takes_its_cache_s_memory_before_it_is_used(talker):
    load, options = LoadOptions(max_seqs=4), EngineOptions(backend="cpu", threads=1, max_context=64)
    config = _configs([Named("tiny", str(talker), options, load)])["tiny"]
    with ExitStack() as opened:
        engine = open_model("tiny", config, print, opened)
        opened.callback(engine.close)
        engine._core._session._population.wait()  # there is one


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no.such.host.invalid", "choose another --host."),
        ("192.0.2.1", "Cannot assign requested address; choose another --host."),
    ],
)
def test_a_host_that_is_not_here_is_told_as_such(host, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        listen(ServeOptions(host=host, port=0))


def test_a_port_that_is_taken_is_told_in_the_system_s_words():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError) as told:
            listen(ServeOptions(host="127.0.0.1", port=port))
    assert str(told.value) == f"127.0.0.1:{port} cannot be listened on: Address already in use; choose another --port."


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="The system has no sockets for both.")
def test_every_address_has_those_of_ipv4_among_them():
    with listen(ServeOptions(host="::", port=0)) as listening:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listening.getsockname()[1]), timeout=5).close()
    with listen(ServeOptions(host="::1", port=0)) as listening, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", listening.getsockname()[1]), timeout=5)
