"""What a schema takes, asked of a tiny vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models

from engine.formats import open_checkpoint
from engine.sampling import StructuredOutputs
from engine.sampling.grammar import GrammarCompiler, _Vocabulary


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Whether a schema takes a text."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_models.write_llama(folder, np.random.default_rng(0))
    tokenizer = open_checkpoint(folder).tokenizer()
    compiler = GrammarCompiler(tokenizer, tiny_models.VOCAB, tokenizer.eos_ids)
    spelling = _Vocabulary(tokenizer, tiny_models.VOCAB, sorted(tokenizer.eos_ids))
    mask = np.zeros((tiny_models.VOCAB + 31) // 32, np.uint32)

    def takes(schema: dict[str, Any], text: str) -> bool:
        matcher = compiler.matchers(StructuredOutputs(json=schema), 1, ignore_eos=False)[0]
        for token in spelling(text):
            matcher.fill(mask)
            if not mask[token // 32] >> np.uint32(token % 32) & 1:
                return False
            matcher.advance(token)
        matcher.fill(mask)
        return any(mask[token // 32] >> np.uint32(token % 32) & 1 for token in tokenizer.eos_ids)

    return takes
