"""The trained network as a folder of Hugging Face, and that as the GGUF which the package carries."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import tokenizers
from safetensors.torch import save_file

from .model import Demo, config, tensors
from .tokens import BOS, END, PAD, TEMPLATE

TEMPERATURE = 0.3
"""What the chat samples the demo with: facts stay right, and stories differ."""


def write_folder(model: Demo, tokenizer: tokenizers.Tokenizer, folder: Path) -> None:
    """config.json, model.safetensors in f32, tokenizer.json, and the chat template in tokenizer_config.json."""
    (folder / "config.json").write_text(json.dumps(config(model.shape), indent=1))
    save_file(tensors(model), str(folder / "model.safetensors"))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": TEMPERATURE, "eos_token_id": 2}))


def write_gguf(model: Demo, tokenizer: tokenizers.Tokenizer, target: Path) -> None:
    """The same by ``engine quantize`` in Q8_0."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "engine-demo"
        folder.mkdir()
        write_folder(model, tokenizer, folder)
        made = Path(name) / "demo.gguf"
        command = [sys.executable, "-m", "engine.cli.main", "quantize", str(folder), str(made), "-t", "Q8_0"]
        subprocess.run(command, check=True)
        target.write_bytes(made.read_bytes())
