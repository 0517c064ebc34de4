"""Philox4x32-10 against Random123's known answers and an independent definition in Python integers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.ops.philox import philox4x32, uniform

WORD = st.integers(0, 2**32 - 1)

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer.
KNOWN = """
00000000 00000000 00000000 00000000 00000000 00000000   6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff   408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0   d16cfe09 94fdcceb 5001e420 24126ea1
"""


def plain_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_known_answers():
    vectors = np.array([[int(word, 16) for word in line.split()] for line in KNOWN.strip().splitlines()], np.uint32)
    answers = philox4x32(vectors[:, :4], vectors[:, 4:6])
    assert answers.dtype == np.uint32
    assert np.array_equal(answers, vectors[:, 6:])


@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_any_counter_and_key(counter, key):
    got = philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32))
    assert got.tolist() == plain_philox(counter, key)


def test_keys_and_counters_broadcast():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (5, 3, 4), dtype=np.uint32)
    key = rng.integers(0, 2**32, 2, dtype=np.uint32)
    together = philox4x32(counters, key)
    assert together.shape == (5, 3, 4)
    assert np.array_equal(together[4, 1], philox4x32(counters[4, 1], key))


def test_uniform_is_exact_and_inside_the_interval():
    words = np.array([0, 255, 256, 2**31, 2**32 - 256, 2**32 - 1], np.uint32)
    expected = [2**-25, 2**-25, 3 * 2**-25, 0.5 + 2**-25, 1 - 2**-25, 1 - 2**-25]
    assert uniform(words).tolist() == expected
