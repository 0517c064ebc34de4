"""Models by name against a server that speaks the hub's protocol: pull, list, show, rm, ps, and names in other commands."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import BELOW

from engine.formats import open_checkpoint
from engine.hub.variants import RepoFile, variants

COMMAND = [sys.executable, "-m", "engine.cli.main"]
GREEDY = ("--temperature", "0", "--backend", "cpu", "--max-tokens", "4")


def listed(engine) -> dict[str, dict]:
    return {one["name"]: one for one in json.loads(engine("list", "--json").stdout)}


def incomplete(tmp_path) -> list[Path]:
    return list((tmp_path / "hf").rglob("*.incomplete"))


def test_a_pulled_model_is_listed_shown_run_and_removed(hub, engine, gguf):
    done = engine("pull", "anna/tiny-GGUF:q8_0")
    assert done.returncode == 0, done.stderr
    assert "anna/tiny-GGUF:Q8_0" in done.stdout and "Q8_0" in done.stderr
    assert list(listed(engine)) == ["anna/tiny-GGUF:Q8_0"]
    assert Path(listed(engine)["anna/tiny-GGUF:Q8_0"]["path"]).read_bytes() == gguf
    shown = json.loads(engine("show", "anna/tiny-GGUF", "--json").stdout)
    assert shown["architecture"] == "llama" and shown["chat_template"] and "Q8_0" in shown["formats"]
    hub.status = 500  # what is here needs no hub
    said = engine("generate", "anna/tiny-GGUF:Q8_0", "a", *GREEDY)
    chatted = engine("chat", "anna/tiny-GGUF", "-p", "a", *GREEDY)
    assert said.returncode == 0 and said.stdout.strip(), said.stderr
    assert chatted.returncode == 0 and chatted.stdout.strip(), chatted.stderr
    gone = engine("rm", "anna/tiny-GGUF:Q8_0")
    assert gone.returncode == 0 and not listed(engine), gone.stderr


def test_showing_a_model_that_is_not_here_downloads_nothing(hub, engine, refusal):
    said = refusal("show", "anna/tiny-GGUF:Q8_0")
    assert "anna/tiny-GGUF:Q8_0 is not here" in said and said.endswith("engine pull anna/tiny-GGUF:Q8_0 gets it.")
    assert hub.sent == 0 and not listed(engine)


@pytest.mark.parametrize("name", ["anna/tiny-GGUF:Q8_0", "anna/tiny"])
def test_what_is_pulled_again_is_said_to_be_here(hub, engine, name):
    first, again = engine("pull", name), engine("pull", name)
    assert "Downloading" in first.stderr and "here already" not in first.stderr
    assert "Downloading" not in again.stderr and "is here already" in again.stderr, again.stderr
    assert first.stdout == again.stdout


def test_what_is_here_is_not_locked_in_a_cache_that_cannot_be_written(hub, engine, tmp_path):
    first = engine("pull", "anna/tiny-GGUF:Q8_0")
    locks = tmp_path / "hf" / "hub" / ".locks"
    shutil.rmtree(locks)
    locks.write_text("a file, which root cannot write into, either")
    again = engine("pull", "anna/tiny-GGUF:Q8_0")
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr


def test_a_folder_that_may_not_be_read_hides_no_other_model(hub, engine):
    assert engine("pull", "anna/tiny-GGUF:Q8_0").returncode == 0
    code = (
        "from engine.hub import cache\n"
        "read = cache.cached_variants\n"
        "def unreadable(repo):\n"
        "    if repo == 'aaron/private': raise PermissionError(13, 'Permission denied')\n"
        "    return read(repo)\n"
        "cache.cached_variants = unreadable\n"
        "(cache.cache_folder() / 'models--aaron--private').mkdir()\n"
        "print(*(one.name for one in cache.cached_models()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "anna/tiny-GGUF:Q8_0\n", done.stderr


def test_huggingface_hub_finds_what_was_pulled(hub, engine, gguf):
    assert engine("pull", "anna/tiny-GGUF:Q8_0").returncode == 0
    hub.sent = 0
    code = "import huggingface_hub as h; print(h.hf_hub_download('anna/tiny-GGUF', 'tiny-Q8_0.gguf'))"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(path).read_bytes() == gguf and hub.sent == 0


def test_without_a_type_the_best_that_fits_is_taken_and_said(hub, engine):
    done = engine("pull", "anna/tiny-GGUF")
    assert done.returncode == 0, done.stderr
    assert "Q8_0" in done.stdout and "the best of 3" in done.stderr and "Q4_K_M" in done.stderr


def test_a_folder_is_pulled_whole_and_nothing_else(hub, engine, folder_files):
    done = engine("generate", "anna/tiny", "a", *GREEDY)  # a name that is not here is downloaded
    assert done.returncode == 0 and "Downloading anna/tiny" in done.stderr, done.stderr
    (one,) = listed(engine).values()
    folder = Path(one["path"])
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    wanted = {name for name in folder_files if name.endswith((".json", ".safetensors", ".jinja", ".model", ".txt"))}
    assert names == wanted | set(BELOW)
    assert open_checkpoint(folder).embedding().pooling == "mean"
    assert engine("rm", "anna/tiny").returncode == 0 and not listed(engine)


def test_an_address_of_a_file_is_a_name(hub, engine):
    done = engine("pull", f"{hub.url}/anna/tiny-GGUF/resolve/main/tiny-Q4_K_M.gguf?download=true")
    assert done.returncode == 0 and "anna/tiny-GGUF:Q4_K_M" in done.stdout, done.stderr


def test_python_takes_names_too(hub, home):
    code = (
        "from engine import LLM, SamplingParams\n"
        "with LLM('anna/tiny-GGUF:Q8_0', backend='cpu') as llm:\n"
        "    print(len(llm.generate('a', SamplingParams(max_tokens=3, temperature=0))[0].outputs[0].token_ids))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "3", done.stderr


def test_one_type_goes_and_the_other_stays(hub, engine):
    for kind in ("Q8_0", "Q4_K_M"):
        assert engine("pull", f"anna/tiny-GGUF:{kind}").returncode == 0
    assert engine("rm", "anna/tiny-GGUF:Q4_K_M").returncode == 0
    assert list(listed(engine)) == ["anna/tiny-GGUF:Q8_0"]
    assert engine("generate", "anna/tiny-GGUF", "a", *GREEDY).returncode == 0


def test_a_broken_connection_goes_on_where_it_was(hub, engine, large):
    hub.broken_after, hub.breaks = len(large) // 2, 1
    done = engine("pull", "anna/large-GGUF:Q8_0")
    assert done.returncode == 0, done.stderr
    assert len(hub.ranges) == 2 and hub.ranges[1] > 0
    assert Path(listed(engine)["anna/large-GGUF:Q8_0"]["path"]).read_bytes() == large


def test_a_pull_that_was_killed_goes_on_where_it_was(hub, engine, large, tmp_path):
    hub.broken_after, hub.breaks = len(large) // 2, 1
    # It waits a second before it tries again: long enough to be killed.
    with subprocess.Popen([*COMMAND, "pull", "anna/large-GGUF:Q8_0"], stderr=subprocess.DEVNULL) as child:
        while not hub.ranges or not any(path.stat().st_size for path in incomplete(tmp_path)):
            assert child.poll() is None or hub.ranges
        child.kill()
    (partial,) = incomplete(tmp_path)
    here = partial.stat().st_size
    assert 0 < here < len(large) and not listed(engine)
    hub.ranges.clear()
    assert engine("pull", "anna/large-GGUF:Q8_0").returncode == 0
    assert hub.ranges == [here] and not incomplete(tmp_path)
    assert Path(listed(engine)["anna/large-GGUF:Q8_0"]["path"]).read_bytes() == large


def test_a_server_without_ranges_begins_anew(hub, engine, large):
    hub.broken_after, hub.breaks, hub.ignores_ranges = len(large) // 2, 1, True
    assert engine("pull", "anna/large-GGUF:Q8_0").returncode == 0
    assert Path(listed(engine)["anna/large-GGUF:Q8_0"]["path"]).read_bytes() == large


def test_damaged_contents_are_refused(hub, engine, refusal, tmp_path):
    hub.damaged = True
    assert "damaged" in refusal("pull", "anna/tiny-GGUF:Q8_0")
    assert not listed(engine) and not incomplete(tmp_path)
    hub.damaged = False
    assert engine("pull", "anna/tiny-GGUF:Q8_0").returncode == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("anna/nothing", "nor the hub has anna/nothing"),
        ("anna/gated", "accept its terms"),
        ("anna/pictures", "neither a GGUF file"),
        ("anna/tiny-GGUF:Q3_K_S", "it has"),
        ("tiny", "no name of a model"),
        ("https://example.org/anna/tiny", "no address of the hub"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(hub, refusal, name, said):
    assert said in refusal("pull", name)


def test_a_bench_s_tokenizer_may_be_a_name(hub, refusal, tmp_path):
    options = ("--model", "x", "--dataset-path", tmp_path / "none.json", "--tokenizer", "anna/nothing")
    assert "nor the hub has anna/nothing" in refusal("bench-serve", "http://127.0.0.1:9", *options)


def test_a_hub_in_trouble_is_one_sentence(hub, refusal, monkeypatch):
    hub.status = 418
    assert "418" in refusal("pull", "anna/tiny-GGUF")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal("generate", "anna/tiny-GGUF", "a")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refusal("pull", "anna/tiny-GGUF").startswith("engine: The hub at http://127.0.0.1:9 cannot be reached")
    said = "There is no file or folder models/tiny, nor is it in the cache. The hub at http://127.0.0.1:9 cannot be reached"
    assert said in refusal("generate", "models/tiny", "a")


def test_a_full_disk_is_one_sentence_and_what_came_stays(hub, engine, large):
    """By a limit on the size of files, which fails like a disk without room."""
    small = len(large) // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (small, resource.RLIM_INFINITY))

    done = subprocess.run(
        [*COMMAND, "pull", "anna/large-GGUF:Q8_0"], capture_output=True, text=True, preexec_fn=limit, check=False
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "cannot be written" in done.stderr.splitlines()[-1] and not listed(engine)
    hub.ranges.clear()
    assert engine("pull", "anna/large-GGUF:Q8_0").returncode == 0
    assert hub.ranges[0] > 0
    assert Path(listed(engine)["anna/large-GGUF:Q8_0"]["path"]).read_bytes() == large


@pytest.mark.parametrize("gone", [(), ("tokenizer.json",)])
def test_what_is_here_needs_no_room(hub, engine, folder_files, gone):
    assert engine("pull", "anna/tiny").returncode == 0
    for name in gone:
        (file,) = Path(listed(engine)["anna/tiny:safetensors"]["path"]).glob(name)
        file.resolve().unlink()
    room = sum(len(folder_files[name]) for name in gone)
    code = (
        "import shutil; from types import SimpleNamespace; from engine.hub import pull; from engine.hub.names import HubName\n"
        f"shutil.disk_usage = lambda path: SimpleNamespace(free={room})\n"
        "print(pull(HubName('anna/tiny')).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "anna/tiny:safetensors", done.stderr


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_may_not_is_told(hub, refusal, status):
    hub.status = status
    assert f"answers {status} for anna/tiny-GGUF: run `hf auth login`" in refusal("pull", "anna/tiny-GGUF")


def test_a_cache_that_cannot_be_written_is_one_sentence(hub, refusal, tmp_path):
    (tmp_path / "hf").write_text("a file, which root cannot write into, either")
    assert "cannot be written" in refusal("pull", "anna/tiny-GGUF")


def test_ps_lists_what_is_loaded_and_forgets_what_was_killed(hub, engine):
    assert engine("pull", "anna/tiny-GGUF:Q8_0").returncode == 0
    assert "No process" in engine("ps").stderr
    command = [*COMMAND, "generate", "anna/tiny-GGUF", "a", "--ignore-eos", "--backend", "cpu", "--max-tokens", "30000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        child.stdout.read(1)
        (one,) = json.loads(engine("ps", "--json").stdout)
        assert (one["pid"], one["command"], one["backend"]) == (child.pid, "generate", "cpu")
        assert one["model"].endswith("tiny-Q8_0.gguf") and one["weights"] > 0 and one["kv"] > 0
        assert str(child.pid) in engine("ps").stdout
        child.kill()
    assert "No process" in engine("ps").stderr


def test_a_matrix_behind_a_pooling_is_no_model():
    names = ("config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "pytorch_model.bin")
    files = [RepoFile(name, 1) for name in names]
    assert variants(files) == []
    [found] = variants([*files, RepoFile("model.safetensors", 1)])
    assert {file.path for file in found.files} == {*names[:3], "model.safetensors"}
