"""Stop strings of a beam search: what decoding each beam anew finds, for one token a candidate."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine import BeamSearchParams
from engine.formats.tokenizer import Detokenizer
from engine.runtime.beams import make_search
from engine.runtime.detokenize import continuation
from engine.sampling.beam import BeamSearch

END, SHOWN_END = 0, 1
TOKENS = [b"", b"b", b"a", b"b", b"ab", b"", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xff"]


class Decoder:
    """A tokenizer that only decodes, and counts what."""

    def __init__(self):
        self.decoded = Counter()

    def token_bytes(self, token, skip_special):
        self.decoded[token] += 1
        return TOKENS[token]

    def detokenizer(self, skip_special):
        return Detokenizer(self, True, skip_special)


def request(params):
    return SimpleNamespace(params=params.sampling(), stop_ids=frozenset({END, SHOWN_END}))


def decoding_anew(params):
    """The search whose beams' texts are decoded from their first tokens, at every candidate."""
    asked = request(params)

    def ending(tokens):
        if tokens[-1] in asked.stop_ids and len(tokens) >= params.min_tokens:
            return tokens[-1]
        text = continuation(0, asked.params, Decoder())
        stopped = any(text.push(token, None, token in asked.stop_ids) for token in tokens)
        return text.stop_reason if stopped else None

    return BeamSearch(params, 12, 2, ending)


def rows(seed, beams):
    """Candidates of each beam, best first; the ends seldom among them."""
    choose = random.Random(seed)
    likely = [choose.choice([token, token, 4]) for token in range(2, len(TOKENS))] + choose.sample([END, SHOWN_END], 1)
    return [
        sorted(
            ((token, -choose.random()) for token in dict.fromkeys(choose.sample(likely, 6))), key=lambda pair: -pair[1]
        )
        for _ in beams
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\u00e9\ufffd", min_size=1, max_size=4), max_size=3),
    st.integers(0, 6),
    st.booleans(),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_a_search_is_as_if_all_were_decoded_anew(stop, least, include, width, seed):
    params = BeamSearchParams(
        beam_width=width, stop=stop, min_tokens=least, include_stop_str_in_output=include, early_stopping="never"
    )
    ours, naive = make_search(request(params), params, 12, Decoder()), decoding_anew(params)
    for step in range(12):
        going = ours.advance(rows(seed + step, ours.beams))
        assert going == naive.advance(rows(seed + step, naive.beams))
        assert (ours.beams, ours.finished) == (naive.beams, naive.finished)
        if not going:
            break


def test_a_candidate_costs_one_token():
    params = BeamSearchParams(beam_width=2, stop=["bbb"], max_tokens=None)
    decoder = Decoder()
    search = make_search(request(params), params, 1000, decoder)
    for _ in range(200):
        assert search.advance([[(2, -0.1), (4, -0.2), (6, -0.3)] for _ in search.beams])
    assert decoder.decoded.total() <= 200 * search.candidates
