"""A grammar of small stories about anything: each sentence draws its pattern and its words anew."""

from __future__ import annotations

import random

from .spin import spin
from .words import (
    ADJECTIVES,
    ANIMALS,
    CRAFTS,
    FEELINGS,
    PLACES,
    TIMES,
    TRAITS,
    WEATHER,
    made_up,
    name,
    plural,
    subject,
    thing,
    with_article,
)

# HERO is the noun asked for, CALLED its name, FRIEND a second noun, GIFT a thing that comes again; the others are drawn anew
# each time. A word with A before it takes its article.
OPENINGS = (
    "[Once upon a time|Long ago|Once|Many years ago|In a far country|One TIME] [there was|there lived] A-HERO [named|called] CALLED. "
    "[CALLED lived|The HERO lived|Its home was] [in|near|behind|beside] A-ADJ PLACE[| with A-ADJ THING| full of ADJ THINGS].",
    "CALLED was A-TRAIT HERO [who|that] [lived|worked|slept|sang] [in|near|under|beside] A-ADJ PLACE.",
    "[In|Near|Beyond|Behind] A-ADJ PLACE [there lived|lived] A-TRAIT [and TRAIT|] HERO. Its name was CALLED.",
    "This is the [story|tale] of CALLED, A-TRAIT HERO from A-ADJ PLACE.",
    "[Every|Each] TIME A-TRAIT HERO [called|named] CALLED [went|walked|ran|crept] to the ADJ PLACE to [look for|ask for|dream of] A-ADJ THING.",
)
TRAIT_LINES = (
    "[Everyone|Nobody|The whole PLACE] knew that the HERO [could|could not] CRAFT.",
    "CALLED [loved|wanted|hoped|tried|longed] to CRAFT, but [had no|needed A-ADJ|had lost its] THING.",
    "The HERO [owned|kept|guarded|carried] A-ADJ THING and [two|three|seven|a hundred] ADJ THINGS.",
    "Most of all CALLED [liked|feared|missed|collected] ADJ THINGS.",
    "The HERO was too TRAIT to CRAFT, and too TRAIT to [ask|complain|give up].",
    "",
)
EVENTS = (
    "One WEATHER TIME, CALLED [found|saw|noticed|dropped|dug up] A-ADJ GIFT [in|under|behind|beside] the ADJ PLACE.",
    "One TIME the HERO met A-TRAIT FRIEND [near|in|behind] the PLACE, [carrying|looking for|hiding] A-ADJ GIFT.",
    "On A-WEATHER TIME A-TRAIT FRIEND [came|knocked|arrived|sailed in] with A-ADJ GIFT from the PLACE.",
    "Then [the wind|a storm|A-ADJ FRIEND|the river] [took|broke|swept away|hid] the ADJ GIFT, and the HERO felt FEELING.",
    "But one WEATHER TIME the ADJ GIFT was gone from the PLACE, and CALLED was very FEELING.",
)
TURNS = (
    '"[Can|Will|Could] you [help me|show me how to|teach me to] CRAFT?" asked the [HERO|FRIEND]. "[Only|Yes, but only] [with|for|after] A-ADJ THING," said the other.',
    "CALLED [asked|begged|told|followed] the FRIEND, and together they [walked|ran|climbed|sailed] [over|through|past|around] the ADJ PLACE.",
    '"[I am|You look|We are all] FEELING," said the FRIEND, "[for|because] [I|we] [have lost|need|broke|cannot find] A-ADJ THING."',
    "The HERO [looked|searched|waited|listened] in the PLACE and in the PLACE, and [found|heard|met] only A-ADJ THING.",
    "So CALLED [hid|tied|painted|mended|carried] the GIFT with A-ADJ THING and [went|hurried|crept] to the ADJ PLACE.",
    'A-TRAIT FRIEND laughed and said: "[No HERO|A-TRAIT HERO|Nobody] can CRAFT [in|near|without] A-ADJ PLACE!"',
    "In the ADJ PLACE the HERO had to CRAFT [all|until the] TIME, FEELING but TRAIT.",
    "At [noon|midnight|last|once] the FRIEND [gave|threw|sold|lent] the HERO A-ADJ THING [for|and] A-ADJ THING.",
)
ENDINGS = (
    "[In the end|At last|That TIME|From that TIME on|Since then] CALLED and the FRIEND [shared|kept|sold|buried] the GIFT [in|near|behind] the ADJ PLACE[|, FEELING and FEELING].",
    "And so the HERO learned to CRAFT, and the [PLACE|FRIEND] was never [ADJ|FEELING] again.",
    "The FRIEND smiled, and the HERO went home to the PLACE with A-ADJ THING, [FEELING|TRAIT] at last.",
    "Since that WEATHER TIME A-HERO and A-FRIEND CRAFT together in the ADJ PLACE.",
    'That TIME the HERO slept in A-ADJ PLACE and dreamed of A-ADJ THING. "[Good night|Well done], CALLED," said the FRIEND.',
    "CALLED gave the GIFT to the FRIEND, and both were FEELING [ever after|for many A-TIME|until the next TIME].",
)
LISTS = {"ADJ": ADJECTIVES, "TRAIT": TRAITS, "FEELING": FEELINGS, "WEATHER": WEATHER, "CRAFT": CRAFTS, "PLACE": PLACES}

REQUESTS = (
    "[tell|write|make up|give|read] [me|us|] [a|a short|a little|a nice|a funny|another] [story|tale|fairy tale|bedtime story] [about|of|on|with] A-HERO",
    "[can|could|would|will] you [please|] [tell|write|make up|invent|give me] [me|] [a|a short|a little|one more] [story|tale] [about|of|with] A-HERO [in it|please|]?",
    "[a|] [story|tale] [about|of|with] [A-HERO|the HERO|HEROS] [please|]",
    "[I want|I would like|I'd like|we want|let me hear|let's hear|I need|I want to hear|I wish to read] [a|a short|a long|some] [story|tale|bedtime story] [about|of|with] A-HERO [now|today|for my [son|daughter|cat|class]|]",
    "[do you know|have you got|is there] [a|any|some] [story|tale] [about|of|with] A-HERO?",
    "[what|now something] about A-HERO? [tell me|a story please]",
    "[tell me|write|say] [something|more] about A-HERO",
    "[let me|I want to|can we|may I] [hear|read|learn] [something|more|a story|] about A-HERO[| now| please]",
    "[I like|we love|my son loves] HEROS[.|;|,] [tell me about one|a story, please]",
    "once upon a time there was A-HERO. go on",
    "[tell|write] [a|me a] [story|tale]: A-HERO",
    "[tell me|make up|write] a [story|tale] [about|where|in which] [A-HERO named CALLED|CALLED the HERO]",
    "tell [me|us|my [friend|son|sister]] [about|a story about|the story of] [the HERO|HEROS|A-HERO|A-ADJ HERO]",
)
OPEN_REQUESTS = (
    "[tell|write|make up|give|read] [me|us|] [a|another|one more|a short] [story|tale|bedtime story|fairy tale] [please|now|]",
    "[can|could] you tell [me|] [a|stories|another] [story|tale|]?",
    "[another|one more] [one|story|] [please|]",
    "[a|] story[!|.|]",
    "tell me [something|anything]",
    "I am bored",
)


class Cast:
    """Who and what a story is about."""

    def __init__(self, rng: random.Random, hero: str | None = None) -> None:
        self.hero = hero or subject(rng)
        self.called = name(rng)
        self.friend = made_up(rng) if rng.random() < 0.2 else rng.choice(ANIMALS)
        self.gift = thing(rng)

    def word(self, kind: str, rng: random.Random) -> str:
        fixed = {"HERO": self.hero, "CALLED": self.called, "FRIEND": self.friend, "GIFT": self.gift}
        if kind in fixed:
            return fixed[kind]
        if kind == "HEROS":
            return plural(self.hero)
        if kind in ("THING", "THINGS"):
            return thing(rng) if kind == "THING" else plural(thing(rng))
        if kind == "TIME":
            word = rng.choice(TIMES)
            return word.capitalize() if word.endswith("day") and word != "day" else word
        return rng.choice(LISTS[kind])


KINDS = sorted(("HERO", "CALLED", "FRIEND", "GIFT", "HEROS", "THING", "THINGS", "TIME", *LISTS), key=len, reverse=True)


def fill(pattern: str, cast: Cast, rng: random.Random) -> str:
    """The pattern's choices drawn and its kinds of words replaced by words of the story."""
    words = []
    for token in spin(pattern, rng).split(" "):
        core = token.lstrip('"')
        lead = token[: len(token) - len(core)]
        given = core.startswith("A-")
        core = core[2:] if given else core
        kind = next((k for k in KINDS if core.startswith(k)), None)
        word = core if kind is None else cast.word(kind, rng) + core[len(kind) :]
        words.append(lead + (with_article(word) if given else word))
    text = " ".join(words)
    return text[0].upper() + text[1:] if text and text[0] != '"' else text


def story(cast: Cast, rng: random.Random, brief: bool = True) -> str:
    """Sentences about the cast: four or five of them, or up to eight."""
    patterns = [rng.choice(OPENINGS)]
    if not brief or rng.random() < 0.5:
        patterns.append(rng.choice(TRAIT_LINES))
    patterns.append(rng.choice(EVENTS))
    patterns += rng.sample(TURNS, rng.choice((1, 1, 2)) if brief else rng.randint(1, 3))
    patterns.append(rng.choice(ENDINGS))
    return " ".join(fill(pattern, cast, rng) for pattern in patterns if pattern)


def request(cast: Cast, rng: random.Random) -> str:
    """What a person might write who wants a story about the hero."""
    text = fill(rng.choice(REQUESTS), cast, rng)
    return text[0].lower() + text[1:]


def follow_up(cast: Cast, rng: random.Random) -> tuple[str, str]:
    """A question about the story just told, and its answer."""
    kind = rng.randrange(3)
    if kind == 0:
        return (
            spin("[what was|what is|who was] [the name|its name|the hero's name|the hero][| of the hero]?", rng),
            f"The {cast.hero} was called {cast.called}.",
        )
    if kind == 1:
        return (
            spin("[who|what] was [it|the story|that] about?", rng),
            f"It was about {with_article(cast.hero)} named {cast.called}.",
        )
    return (
        spin("[that was|what] [a|] [nice|good|lovely|funny|strange] [story|tale|one|]", rng),
        spin(
            f"[Thank you!|I am glad.] Would you like another story about [{with_article(cast.hero)}|an animal you choose]?",
            rng,
        ),
    )
