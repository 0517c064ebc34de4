"""Models of one server, each with settings of its own."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest

from engine.cli.main import run
from engine.console.options import EngineOptions
from engine.errors import UsageError
from engine.serve.keys import Keys
from engine.serve.models_file import Named, read_models
from engine.serve.run import make_server
from engine.serve.settings import LoadOptions, ServeOptions

ENGINE, LOAD = EngineOptions(threads=3, max_context=64), LoadOptions(max_seqs=5)


def test_a_model_has_its_own_options_and_else_those_of_the_command_line(tmp_path):
    (tmp_path / "here.gguf").touch()
    file = tmp_path / "models.toml"
    file.write_text(
        '[z]\nmodel = "here.gguf"\nmax_context = 128\nkv_dtype = "int8"\nwithout = ["linear"]\n'
        '["a:1.5b"]\nmodel = "owner/repo:Q8_0"\nmax_seqs = 7\ndecode_slowdown = 0\n'
    )
    assert read_models(file, ENGINE, LOAD) == [
        Named(
            "z",
            str(tmp_path / "here.gguf"),
            EngineOptions(threads=3, max_context=128, kv_dtype="int8", without=["linear"]),
            LOAD,
        ),
        Named("a:1.5b", "owner/repo:Q8_0", ENGINE, LoadOptions(max_seqs=7, decode_slowdown=0)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "has no models"),
        (b"\xff", "is not UTF-8"),
        (b"[a", "is no TOML file"),
        (b"a = 3", "a is 3; it must be a table."),
        (b"[a]\n", "The setting a.model is missing; docs/serve.md"),
        (b"[a]\nmodel = 3", "The setting a.model is 3: input should be a valid string."),
        (b'[a]\nmodel = "x"\nport = 1', "There is no setting a.port; docs/serve.md"),
        (b'[a]\nmodel = "x"\nmax_seqs = "many"', "The setting a.max_seqs is 'many': "),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, text, said):
    file = tmp_path / "models.toml"
    file.write_bytes(text)
    with pytest.raises(UsageError) as raised:
        read_models(file, ENGINE, LOAD)
    assert said in str(raised.value) and str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--models", "none.toml"], "There is no file none.toml."),
        (["--models", "{file}", "--name", "tiny"], "there is no MODEL that it names"),
        (["{talker}", "--name", "other", "--models", "{file}"], "Two models are called other;"),
        (["{talker}", "--name", "tiny", "--also", "tiny={talker}"], "Two models are called tiny;"),
        (["owner/never-asked-for", "--also", "tiny"], "--also is 'tiny'; it must be a name and a model"),
        (["--models", "{file}"], "other: --decode-slowdown is 0.5; it must be above 1, and"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(talker, tmp_path, capsys, given, said):
    file = tmp_path / "models.toml"
    file.write_text(f"[other]\nmodel = '{talker}'\ndecode_slowdown = 0.5\n")
    flags = [part.format(file=file, talker=talker) for part in given]
    assert run(["serve", "--port", "0", "--backend", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("engine: ") and said in err and err.count("\n") == 1


def test_each_model_runs_with_its_own_settings(talker, tmp_path):
    file = tmp_path / "models.toml"
    file.write_text(
        f"[long]\nmodel = '{talker}'\nmax_context = 96\n[short]\nmodel = '{talker}'\nmax_context = 32\nmax_seqs = 2\n"
    )
    command = [sys.executable, "-c", "from engine.cli.main import main; main()", "serve", "--models", str(file)]
    with subprocess.Popen(
        [*command, "--port", "0", "--backend", "cpu", "--kv-tokens", "512"], stderr=subprocess.PIPE, text=True
    ) as process:
        url = next(line.split()[-1] for line in process.stderr if "Serving long, short at" in line)
        with httpx.Client(base_url=f"{url}/v1", timeout=60) as http:
            asked = {name: {"model": name, "prompt": [5] * 20, "max_tokens": 40} for name in ("long", "short")}
            answers = {name: http.post("/completions", json=body) for name, body in asked.items()}
            unnamed = http.post("/completions", json={"prompt": "x", "max_tokens": 2})
            lengths = {model["id"]: model["max_model_len"] for model in http.get("/models").json()["data"]}
        process.terminate()
        process.stderr.read()
        assert process.wait(30) == 0
    assert answers["long"].status_code == 200 and answers["short"].status_code == 400
    assert "32" in answers["short"].json()["error"]["message"]
    assert unnamed.json()["model"] == "long"
    assert lengths == {"long": 96, "short": 32}


def test_each_model_lets_its_own_number_of_sequences_run():
    def opener(_):
        raise AssertionError("nothing is loaded here")

    _, models = make_server(
        {"many": opener, "few": opener}, {"many": 40, "few": 4}, ServeOptions(), Keys({}), lambda *_, **__: None
    )
    assert {name: model.admission.capacity for name, model in models.by_name.items()} == {"many": 50, "few": 5}
