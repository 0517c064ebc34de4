"""The lexicon of the stories, and words made up so that a model must copy nouns rather than know them."""

from __future__ import annotations

import random

ANIMALS = """fox wolf bear hare rabbit mouse cat dog hen goose duck owl crow raven eagle hawk sparrow robin stork heron
swan frog toad newt snake turtle lizard fish trout pike whale dolphin seal otter beaver badger hedgehog mole bat deer
stag moose goat sheep lamb cow calf bull pig horse pony donkey mule camel lion tiger panda koala monkey ape parrot
snail spider ant bee wasp beetle moth butterfly cricket crab lobster shrimp worm rat hamster kitten puppy dragon
unicorn griffin ferret weasel lynx puma zebra bison buffalo ostrich pigeon dove swallow finch pelican seagull turkey
rooster chick salmon shark eel gecko crocodile alligator hyena baboon gorilla""".split()

PEOPLE = """baker miller sailor farmer painter tailor knight king queen prince princess wizard witch giant dwarf pirate
shepherd gardener teacher doctor captain fisherman hunter cook carpenter clown singer dancer child boy girl robot ghost
postman librarian grandmother grandfather scientist soldier""".split()

THINGS = """lantern key map boat drum bell kite crown ring book letter basket ladder hammer mirror feather button coat hat
boot scarf blanket pillow candle teapot cup spoon bowl jar bottle barrel box chest rope net anchor compass clock watch
coin pearl shell stone pebble acorn leaf seed flower rose apple pear plum cherry lemon nut pumpkin carrot cake pie
loaf cheese flute violin trumpet harp whistle puppet doll ball wheel cart wagon sled bicycle train balloon umbrella
broom bucket shovel brush pencil painting statue chair table bed lamp door window bridge tower star cloud snowflake
telescope needle thimble ribbon bead cookie pancake engine computer rocket submarine cactus mushroom tree""".split()

PLACES = """forest meadow valley hill mountain river lake pond island beach harbour village town castle garden orchard
barn mill cave tunnel swamp desert field road market library kitchen attic cellar tower lighthouse palace school
workshop bakery stable bridge well canyon glacier jungle vineyard courtyard marsh cliff ruin temple station
greenhouse clearing waterfall""".split()

ADJECTIVES = """small little tiny big huge old young brave shy clever lazy quick slow quiet loud gentle proud lonely
cheerful grumpy curious hungry sleepy kind honest careful clumsy wise silly patient stubborn polite restless golden
silver red blue green yellow purple white black grey striped spotted shiny dusty rusty wooden round crooked tall short
thin soft warm cold wet dry bright dark strange lovely broken forgotten hidden secret magic ancient heavy light smooth
rough hollow velvet crystal paper copper""".split()

TRAITS = """brave shy clever lazy quick gentle proud lonely cheerful grumpy curious hungry sleepy kind honest careful
clumsy wise silly patient stubborn polite restless quiet hopeful nervous bold dreamy tidy generous""".split()

FEELINGS = """happy sad angry afraid tired surprised proud worried glad excited puzzled calm jealous grateful bored
ashamed delighted hopeful nervous relieved""".split()

WEATHER = """sunny rainy windy foggy snowy stormy cloudy cold warm frosty misty bright grey quiet golden damp icy
moonlit""".split()

TIMES = "morning evening afternoon night day summer winter autumn spring sunday monday friday midnight noon".split()

CRAFTS = """dance sing swim paint cook sew read write juggle whistle climb sail fly bake knit count draw skate garden
fish dig build mend drum""".split()

NAMES = """Anna Ben Clara Dora Emil Finn Greta Hugo Ida Jon Karl Lena Mia Nils Otto Paula Rosa Sam Tilda Uma Vera Will
Zoe Max Leo Ella Tom Lucy Peter Maria Alex Kim Noah Emma Oscar Ruby Felix Nora Jack Lily""".split()

_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl l m n p pl pr r s sh sk sl sn sp st t th tr v w y z".split()
_VOWELS = "a e i o u a e i o u ai ea ee oa oo ou".split()
_CODAS = ["", "", "", *"b ck d ff g l ll m n nd ng nk p r rd rn rt s ss st t x zz".split()]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made_up(rng: random.Random) -> str:
    """A noun of one to four syllables that no lexicon has; one in eight is a mere row of letters."""
    if rng.random() < 0.125:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 9)))
    parts = rng.choice((1, 2, 2, 2, 3, 3, 4))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(parts))
    return word[rng.random() < 0.2 :] if len(word) > 3 else word + rng.choice(_VOWELS)[:1] + "n"


def subject(rng: random.Random) -> str:
    """What a story is about: half of the time a noun that was made up for it."""
    kind = rng.random()
    if kind < 0.5:
        return made_up(rng)
    return rng.choice(ANIMALS if kind < 0.8 else PEOPLE if kind < 0.88 else THINGS)


def thing(rng: random.Random) -> str:
    return made_up(rng) if rng.random() < 0.1 else rng.choice(THINGS)


def name(rng: random.Random) -> str:
    return made_up(rng)[:8].capitalize() if rng.random() < 0.5 else rng.choice(NAMES)


def with_article(words: str) -> str:
    """``a fox``, ``an owl``."""
    return ("an " if words[0] in "aeiou" or words.startswith("honest") else "a ") + words


def plural(noun: str) -> str:
    if noun.endswith(("s", "x", "z", "ch", "sh")):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith("y") and noun[-2] not in "aeiou" else noun + "s"
