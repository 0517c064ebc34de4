"""The page at /: chat and live figures, in a real browser."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import tiny_models
from browser import Browser

from engine.serve.keys import load_keys

ANSWER = "return document.querySelector('#talk .assistant')?.textContent"
FIGURES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "generated_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "ttft_sum_s": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
    "refused": "engine:requests_refused_total",
}
IDLE = "return document.getElementById('send').textContent === 'Send'"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not there (Debian: chromium-driver)")
    opened = Browser(driver, str(tmp_path_factory.mktemp("profile")))
    yield opened
    opened.close()


def test_a_chat_with_live_figures(running, browser):
    browser.open(running.url)
    browser.wait("return document.getElementById('model').value === 'tiny'")
    browser.type("#text", "Hello <b>you</b>")
    browser.click("#send")
    browser.wait(IDLE + " && document.querySelector('#talk .assistant')")
    first = browser.run(ANSWER)
    assert first
    assert browser.run("return document.querySelector('#talk .user').textContent") == "Hello <b>you</b>"
    assert browser.run("return document.querySelectorAll('#talk b').length") == 0
    assert browser.wait("const t = document.getElementById('ttft').textContent; return t !== '-' && t").endswith(" ms")
    browser.wait("return document.getElementById('kv').textContent === '0.0 %'")
    browser.click("#clear")
    assert browser.run("return document.getElementById('talk').children.length") == 0
    assert browser.faults() == []
    asked = browser.run("return performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)")
    assert set(asked) == {running.url}, "the page works without the internet"


def test_an_answer_without_a_word_is_told(start, browser, tmp_path):
    model = tiny_models.write_talker(tmp_path)
    every = list(range(json.loads((model / "config.json").read_text())["vocab_size"]))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": every}))
    browser.open(start(model=model).url)
    browser.wait("return document.getElementById('model').value === 'tiny'")
    browser.type("#text", "Hello")
    browser.click("#send")
    told = browser.wait(IDLE + " && document.querySelector('#talk .fault')?.textContent")
    assert told == "The model ended its answer before the first word."
    assert browser.run("return document.querySelector('#talk .assistant')") is None


def test_stop_ends_the_answer(start, browser):
    running = start(backend="reference", max_model_len=32768, kv_cache_tokens=33000)
    browser.open(running.url)
    browser.wait("return document.getElementById('model').value === 'tiny'")
    browser.type("#text", "Go on for ever.\n")
    browser.wait(ANSWER)
    browser.wait("return document.getElementById('running').textContent === '1'")
    browser.wait("return parseFloat(document.getElementById('rate').textContent) > 0")
    browser.click("#send")
    browser.wait(IDLE)
    running.wait_until_free()
    browser.type("#text", "Once more.\n")
    browser.wait("return document.querySelectorAll('#talk .assistant').length === 2")
    browser.click("#clear")  # while the answer comes
    browser.wait(IDLE)
    assert browser.run("return [messages.length, document.getElementById('talk').children.length]") == [0, 0]
    running.wait_until_free()
    assert not browser.run("return document.querySelector('#talk .fault')")


def test_a_key_is_asked_for(start, browser):
    running = start(keys=load_keys(None, {"ENGINE_SERVE_KEYS": "sesame"}))
    browser.open(running.url)
    browser.type("#text", "Hello\n")
    assert "key is missing" in browser.wait("return document.querySelector('#talk .fault')?.textContent")
    browser.click("#clear")
    browser.type("#key", "sesame\t")
    browser.wait("return document.getElementById('model').value === 'tiny'")
    browser.type("#text", "Hello\n")
    assert browser.wait(ANSWER)


def test_the_page_needs_nothing_from_elsewhere(running):
    with running.http as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"https?://|src=|@import", page.text)
        http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
        running.wait_until_free()
        model, metrics = http.get("/stats").json()["models"][0], http.get("/metrics").text
        for name, figure in FIGURES.items():
            assert f'{figure}{{model_name="tiny"}} {float(model[name])}\n' in metrics
        assert model["name"] == "tiny" and 0 <= model["kv_usage"] <= 1
