"""The text that the demo learns from: the same for a seed, without what is held out, and true of this engine."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from demo.corpus import Course, conversation
from demo.examine import HeldOut, found_in, names_it, runs, share_new
from demo.facts import TOPICS
from demo.spin import spin
from demo.stories import Cast, request, story
from demo.tokens import BOS, END, MARKS, TEMPLATE, encode, rows_of, train_tokenizer
from train_demo import SEED

from engine.cli.main import make_app
from engine.formats.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return train_tokenizer(3, 300)


def test_a_seed_gives_the_same_text_and_another_gives_another():
    seed = int(np.random.default_rng().integers(1 << 40))
    texts = [conversation(seed, n).text for n in range(50)]
    assert texts == [conversation(seed, n).text for n in range(50)]
    assert len(set(texts) & {conversation(seed + 1, n).text for n in range(50)}) < 15


def test_nothing_held_out_is_in_the_text():
    held_out = HeldOut.read()
    course = Course(SEED, 100, 40)  # what training reads; another seed may make a held-out word up
    assert found_in(islice(course.texts(), 2000), held_out) == set()
    planted = f"so, {held_out.paraphrases[3][0].upper()} A {held_out.animals[5]}s."
    assert found_in([planted], held_out) == {held_out.paraphrases[3][0], held_out.animals[5] + "s"}


def test_stories_name_their_hero_and_differ():
    rng = random.Random(int(np.random.default_rng().integers(1 << 62)))
    casts = [Cast(rng) for _ in range(200)]
    stories = [story(cast, rng) for cast in casts]
    assert all(names_it(text, cast.hero) for text, cast in zip(stories, casts, strict=True))
    assert all(cast.hero in request(cast, rng) or cast.hero[:-1] in request(cast, rng) for cast in casts)
    assert share_new(stories[:100], stories[100:]) >= 0.95
    assert share_new(stories[:100], stories) == 0


def test_runs_are_twelve_words():
    assert list(runs("One, two three four five six seven eight nine ten eleven: twelve thirteen!")) == [
        ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
        ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    ]


@pytest.mark.parametrize("pattern", ["[a|b", "a]b", "[a [b|c] d"])
def test_a_pattern_with_unmatched_brackets_is_refused(pattern):
    with pytest.raises(ValueError, match="needs its"):
        spin(pattern, random.Random(0))


def test_a_pattern_gives_each_of_its_texts():
    drawn = {spin("[a|b [c|d]|] e", random.Random(i)) for i in range(200)}
    assert drawn == {"a e", "b c e", "b d e", "e"}


def test_commands_files_and_options_that_answers_name_exist():
    app = make_app()
    commands = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    answers = " ".join(" ".join(topic.answers) for topic in TOPICS)
    named = set(re.findall(r"`engine ([a-z]+)", answers))
    assert {"quantize", "doctor", "bench"} <= named <= commands
    for file in re.findall(r"(?:docs|tools)/[\w./-]*\w", answers):
        assert (ROOT / file).exists(), file
    files = (file for room in ("cli", "console") for file in (ROOT / "core/engine" / room).glob("*.py"))
    sources = "".join(file.read_text() for file in files)
    for option in re.findall(r"--([a-z]+)", answers):
        assert f'"--{option}"' in sources or re.search(rf"^    {option}: ", sources, re.M) or option == "help", option


def test_ids_are_those_of_the_template(tokenizer):
    """What the training reads is what ``engine chat`` sends."""
    talk = next(c for c in (conversation(5, n) for n in range(1000)) if c.system and len(c.turns) > 1)
    messages = [{"role": "system", "content": talk.system}]
    for question, answer in talk.turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = ChatTemplate(TEMPLATE, {"bos_token": BOS, "eos_token": END}).render(messages, add_generation_prompt=False)
    ids, learned = encode(tokenizer, talk)
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    answers = "".join(answer + END for _, answer in talk.turns)
    kept = [i for i, wanted in zip(ids, learned, strict=True) if wanted]
    assert tokenizer.decode(kept, skip_special_tokens=False) == answers


def test_rows_hold_whole_conversations(tokenizer):
    talks = [conversation(7, n) for n in range(21)]
    groups = rows_of(tokenizer, talks, 10_000)
    held = [[i for i in row if i] for group in groups for row in group.ids.tolist()]
    assert sorted(held) == sorted(encode(tokenizer, talk)[0] for talk in talks)
    lengths = [group.ids.shape[1] for group in groups]
    assert lengths == sorted(lengths) and not any(group.learned[group.ids == 0].any() for group in groups)
    assert all(group.ids.shape[1] <= 50 for group in rows_of(tokenizer, talks, 50))
    assert tokenizer.token_to_id(MARKS[0]) == 0
