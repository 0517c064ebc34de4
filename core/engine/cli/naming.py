"""Faults that name a setting of the engine, told by the option that a person gave it by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# settings of the engine whose options have shorter names
_SHORT = {
    "beam_width": "beams",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_tokens": "kv_tokens",
    "max_model_len": "max_context",
    "max_num_batched_tokens": "max_batch_tokens",
    "max_num_seqs": "max_seqs",
    "num_return_sequences": "n",
    "tensor_parallel_size": "tensor_parallel",
}
# a name that is no word of a sentence, or a sentence's first word where it is said what that is; no part of a path
_NAMED = re.compile(r"(?<!setting )(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/-]|\.\w)|^[a-z]+(?= is )")


def by_options(sentence: str, command: Any) -> str:
    """The sentence with the command's options in place of the settings that they set."""
    options: Mapping[str, str] = {
        parameter.name: max(parameter.opts, key=len) for parameter in command.params if parameter.opts[0][:1] == "-"
    }

    def option(found: re.Match[str]) -> str:
        return options.get(_SHORT.get(found[0], found[0]), found[0])

    return _NAMED.sub(option, sentence)
