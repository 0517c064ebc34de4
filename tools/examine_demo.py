"""Examines the built-in demo model, and writes what it answered to tools/demo/examination.json.

usage: python tools/examine_demo.py [MODEL.gguf]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from demo.corpus import Course
from demo.examine import HeldOut, found_in, share_new, share_right
from demo.sitting import Sitting
from demo.words import made_up, with_article

from engine.demo import MODEL

HERE = Path(__file__).parent / "demo"
GREETINGS = ("hello", "what are you?", "how do I use another model?", "tell me a story about a fox")


def main() -> None:
    held_out = HeldOut.read()
    training = json.loads((HERE / "training.json").read_text())
    nouns = [*held_out.animals, *(made_up(random.Random(i)) for i in range(20))]
    requests = [f"tell me a story about {with_article(noun)}" for noun in nouns]
    with Sitting(Path(sys.argv[1]) if sys.argv[1:] else MODEL) as sitting:
        greetings = dict(zip(GREETINGS, sitting(GREETINGS), strict=True))
        right, told = share_right(sitting, held_out)
        greedy, sampled = sitting(requests), sitting(requests, 1.0, 1)
    texts = list(Course(training["seed"], training["steps"], training["conversations_a_step"]).texts())
    result = {
        "share_right": round(right, 3),
        "right_paraphrases": sum(bool(one["right"]) for one in told[:40]),
        "right_animals": sum(bool(one["right"]) for one in told[40:]),
        "new_stories_greedy": share_new(greedy, texts),
        "new_stories_sampled": share_new(sampled, texts),
        "held_out_found_in_the_text": sorted(found_in(texts, held_out)),
        "greetings": greetings,
        "answers": told,
    }
    (HERE / "examination.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "answers"}, indent=1))


if __name__ == "__main__":
    main()
