"""The built-in demo model: that it is there and small, and that it has learnt rather than memorized."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from demo.corpus import Course
from demo.examine import found_in, names_it, share_new, share_right, words
from demo.words import made_up, with_article

from engine import SamplingParams
from engine.demo import MODEL
from engine.formats import open_checkpoint

LIMIT = 4 << 20
TRAINING = json.loads((Path(__file__).parents[2] / "tools/demo/training.json").read_text())


def test_the_file_is_small_and_has_a_template():
    assert MODEL.stat().st_size <= LIMIT
    checkpoint = open_checkpoint(MODEL)
    assert "<|assistant|>" in checkpoint.chat_template().render([{"role": "user", "content": "hello"}])
    assert 1e6 <= TRAINING["parameters"] <= 3e6


@pytest.mark.parametrize(
    ("question", "needed"),
    [
        ("hello", ("engine",)),
        ("what are you?", ("demo",)),
        ("how do I use another model?", ("engine pull", "engine chat")),
        ("tell me a story about a fox", ("fox",)),
    ],
)
def test_answers_what_newcomers_ask(demo, question, needed):
    (answer,) = demo([question])
    assert all(names_it(answer, one) for one in needed), answer
    assert answer[-1] in '.!?"', answer


def test_tells_a_story_of_sentences(demo):
    (story,) = demo(["tell me a story about a fox"])
    assert len(words(story)) >= 30 and words(story).count("fox") >= 2, story


def test_questions_and_animals_that_were_held_out(demo, held_out):
    assert (len(held_out.paraphrases), len(held_out.animals)) == (40, 20)
    share, told = share_right(demo, held_out)
    assert share >= 0.8, [one for one in told if not one["right"]]


def test_the_second_question_of_a_conversation(demo):
    told = "Tilda was a shy fox who lived near a red barn. The fox went home to the barn, happy at last."
    talk = [
        {"role": "user", "content": "tell me a story about a fox"},
        {"role": "assistant", "content": told},
        {"role": "user", "content": "how do I use another model?"},
    ]
    (output,) = demo.llm.chat([talk], SamplingParams(temperature=0, max_tokens=200))
    assert names_it(output.outputs[0].text, "engine pull"), output.outputs[0].text


@pytest.mark.slow
def test_stories_are_new_and_nothing_held_out_was_read(demo, held_out):
    """Against all the text that the training read, made again from its seed."""
    rng = np.random.default_rng()
    invented = [with_article(made_up(random.Random(int(rng.integers(1 << 62))))) for _ in range(20)]
    asked = [f"tell me a story about {one}" for one in (*map(with_article, held_out.animals), *invented)]
    stories = demo(asked, 1.0, int(rng.integers(1 << 62)))
    course = Course(TRAINING["seed"], TRAINING["steps"], TRAINING["conversations_a_step"])
    texts = list(course.texts())
    assert found_in(texts, held_out) == set()
    assert share_new(stories, texts) >= 0.5
