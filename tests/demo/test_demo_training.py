"""tools/train_demo.py from end to end, with few steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_demo
from demo.model import Demo, Shape, tensors
from demo.sitting import Sitting
from demo.tokens import train_tokenizer

SCRIPT = Path(train_demo.__file__)


@pytest.mark.slow
def test_a_quick_run_gives_a_model_that_loads(tmp_path):
    target, curve = tmp_path / "demo.gguf", tmp_path / "curve.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--work", str(tmp_path), "--target", str(target)]
    done = subprocess.run([*command, "--curve", str(curve)], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    told = json.loads(curve.read_text())
    assert told["steps"] == 3 and told["curve"][-1]["loss"] > 1
    with Sitting(target) as sitting:
        assert sitting(["hello"])[0]


def test_steps_are_the_same_again_and_after_a_restart(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(1, 200)
    monkeypatch.setattr(train_demo, "CONVERSATIONS", 8)
    whole, first = train_demo.Training(tokenizer, 4), train_demo.Training(tokenizer, 4)
    losses = [whole.advance() for _ in range(3)]
    again = [first.advance() for _ in range(2)]
    torch.save(first.state(), tmp_path / "kept.pt")
    second = train_demo.Training(tokenizer, 4)
    second.restore(torch.load(tmp_path / "kept.pt", weights_only=True))
    assert [*again, second.advance()] == losses and losses[2] < losses[0]


def test_the_rate_rises_holds_and_falls():
    rates = [train_demo.schedule(step, 1000) for step in range(1000)]
    assert rates[0] == 1 / 50 and set(rates[49:701]) == {1.0} and rates[850] == pytest.approx(0.5) and rates[-1] == 0.02
    assert [train_demo.schedule(step, 800) for step in range(560)] == rates[:560]


def test_the_network_is_transformers_llama(tmp_path):
    from demo.model import config
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    model = Demo(Shape(1536))
    save_file(tensors(model), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config(model.shape)))
    other = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(6, 1536, (2, 40))
    with torch.no_grad():
        ours = model(ids, torch.ones_like(ids, dtype=torch.bool)).view(2, 40, -1)
        torch.testing.assert_close(ours, other(ids).logits, atol=2e-4, rtol=1e-3)
