"""The demo's tokenizer, its chat template, and conversations as rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers

from .corpus import Conversation, conversation

VOCABULARY = 1536
MARKS = PAD, BOS, END, SYSTEM, USER, ASSISTANT = (
    "<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>",
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{{ '' if message['role'] == 'assistant' else ' ' }}{{ message['content'] | trim }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(seed: int, conversations: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of VOCABULARY tokens, of the first conversations of the corpus; MARKS are its first ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((conversation(seed, i).text for i in range(conversations)), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, talk: Conversation) -> tuple[list[int], list[bool]]:
    """Ids as the template makes them, and which of them are learned: those of answers, with the END after each."""
    pad, bos, end, system, user, assistant = range(len(MARKS))

    def plain(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    ids = [bos]
    learned = [False]

    def add(more: list[int], wanted: bool) -> None:
        ids.extend(more)
        learned.extend([wanted] * len(more))

    if talk.raw:
        ((question, answer),) = talk.turns
        add(plain(question + "\n") if question else [], False)
        add([*plain(answer), end], True)
        return ids, learned
    if talk.system is not None:
        add([system, *plain(f" {talk.system}"), end], False)
    for question, answer in talk.turns:
        add([user, *plain(f" {question}"), end, assistant], False)
        add([*plain(answer), end], True)
    return ids, learned


@dataclass(frozen=True)
class Rows:
    """Conversations of about one length, a row each: ids i64[rows, length], and which of them are learned,
    bool[rows, length]. What is behind a conversation's end is PAD and not learned."""

    ids: np.ndarray
    learned: np.ndarray


def rows_of(tokenizer: tokenizers.Tokenizer, conversations: Sequence[Conversation], longest: int) -> list[Rows]:
    """The conversations, cut at ``longest`` tokens, in at most eight groups of like lengths, the shortest first."""
    talks = sorted((encode(tokenizer, talk) for talk in conversations), key=lambda talk: len(talk[0]))
    groups = []
    for part in np.array_split(np.arange(len(talks)), min(8, len(talks))):
        length = min(len(talks[part[-1]][0]), longest)
        rows = Rows(np.zeros((len(part), length), np.int64), np.zeros((len(part), length), bool))
        for row, number in enumerate(part):
            ids, learned = talks[number][0][:length], talks[number][1][:length]
            rows.ids[row, : len(ids)], rows.learned[row, : len(ids)] = ids, learned
        groups.append(rows)
    return groups
