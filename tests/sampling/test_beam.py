"""The rules of beam search that whole searches seldom come to."""

from __future__ import annotations

from engine.sampling.beam import BeamSearch, BeamSearchParams

END = 2


def search(**settings):
    params = BeamSearchParams(beam_width=2, max_tokens=8, **settings)
    return BeamSearch(params, 8, 1, lambda tokens: END if tokens[-1] == END else None)


def scores(found):
    return [round(hypothesis.score, 6) for hypothesis in found.finished]


def test_a_search_ends_by_the_worst_of_the_finished_that_it_keeps():
    found = search(length_penalty=0.0)
    assert found.advance([[(END, -0.5), (5, -0.6), (6, -0.7)]]) == [(0, 5), (0, 6)]
    # Both beams end, as the first and second of all; the third finished is dropped, and 7 at -0.75 is behind the second.
    rows = [[(END, -0.05), (7, -0.15)], [(END, 0.0), (8, -0.5)]]
    assert found.advance(rows) == []
    assert scores(found) == [-0.5, -0.65]


def test_never_looks_ahead_only_where_length_helps():
    """With a negative penalty a longer sequence scores worse, so what counts is the length that a beam has."""
    found = search(length_penalty=-1.0, early_stopping="never")
    assert found.advance([[(END, -0.15), (5, -0.2), (6, -0.3)]]) == [(0, 5), (0, 6)]
    assert found.advance([[(7, -0.05), (END, -0.3)], [(8, -0.3)]]) == [(0, 7), (1, 8)]
    assert scores(found) == [-0.15, -1.0]


def test_a_beam_without_candidates_ends_alone():
    found = search()
    assert found.advance([[(5, -0.2), (6, -0.3)]]) == [(0, 5), (0, 6)]
    assert found.advance([[], [(7, -0.1), (8, -0.2)]]) == [(1, 7), (1, 8)]
    assert found.advance([[], []]) == []
