"""Where the tokens of a prompt lie in it, with what a tokenizer puts before and after."""

from __future__ import annotations

import json
import shutil

import pytest

from engine.formats import open_checkpoint
from engine.serve.completions import Prompt


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("text", ["Once upon", "<", "s>", "<s>Once", "Once</s>", ""])
def test_of_a_text(tmp_path, llama, text, after):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokens = json.loads(file.read_text())
    if after:
        tokens["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
        tokens["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
        file.write_text(json.dumps(tokens))
    tokenizer = open_checkpoint(tmp_path).tokenizer()
    ids = tuple(tokenizer.encode(text, add_special=True, parse_special=True))
    assert ids[0] == 1 and (ids[-1] == 2 and len(ids) > 1) == (after or text.endswith("</s>"))
    offsets = Prompt(text, ids, written=True).offsets(tokenizer)
    places = [(token, offsets.take(token)) for token in ids]
    own = places[0 if text.startswith("<s>") else 1 : len(ids) - after]
    assert all(text[at:].startswith(tokenizer.decode([token], skip_special=False)) for token, at in own)
    assert all(at in (0, len(text)) for token, at in places if (token, at) not in own)
