"""The forms in which a caller may give prompts."""

import numpy as np
import pytest

from engine.errors import RequestError
from engine.runtime.prompt import listed, plain


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a text", ["a text"]),
        ([1, 2], [(1, 2)]),
        (np.array([3, 4]), [(3, 4)]),
        ({"prompt": "a text"}, ["a text"]),
        ({"prompt_token_ids": [5]}, [(5,)]),
        (["one", [1, 2], {"prompt": "two"}, {"prompt_token_ids": (3,)}], ["one", (1, 2), "two", (3,)]),
        ([], []),
    ],
)
def test_forms(given, wanted):
    assert listed(given) == wanted


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (7, "type int"),
        (b"text", "type bytes"),
        (["a", 2.5], "'a'"),
        ({"prompt": 3}, "'prompt'"),
        ({"prompt_token_ids": "text"}, "'prompt_token_ids'"),
        ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data'"),
        ({"prompt_token_ids": [1, None]}, "None"),
    ],
)
def test_others_are_refused_in_a_sentence(given, said):
    with pytest.raises(RequestError, match=said):
        plain(given)


def test_the_engine_takes_them(llama):
    from engine import LLM, SamplingParams

    with LLM(llama, backend="reference") as llm:
        params = SamplingParams(max_tokens=3, temperature=0)
        plainly, mapped = (llm.generate(prompt, params)[0] for prompt in ([4, 5, 6], {"prompt_token_ids": [4, 5, 6]}))
        assert plainly.outputs[0].token_ids == mapped.outputs[0].token_ids
        assert next(iter(llm.stream({"prompt_token_ids": [4, 5, 6]}, params))).prompt_token_ids == (4, 5, 6)
