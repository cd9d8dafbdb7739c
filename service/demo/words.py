"""Word games and simple facts from the lists in knowledge/words.toml, and copying."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from typing import Any

from service.demo.exchange import Exchange, Thread, capital, fill, join
from service.demo.knowledge import FOLDER

_QUOTES = ("{}", "{}", "{}", '"{}"', "'{}'", "the word {}", 'the word "{}"')
_NAMES = (
    "Ada Ali Amy Anna Ben Bob Carla Chen Clara Dan David Ella Emma Eva Finn Grace Hugo Ida Ivan Jack Jane Jim Julia Karl Kim Laura Leo "
    "Lily Lina Lucas Lucy Maria Mark Max Maya Mia Nina Noah Nora Olga Oscar Otto Paul Peter Priya Rosa Ruth Sam Sara Sofia Tim Tom Vera Yuki Zoe"
).split()
_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str sw t th tr v w wh y z".split() + [""]
_VOWELS = "a e i o u a e i o u ai au ea ee ie oa oo ou y".split()
_CODAS = ["", "", "", *"b ck d f ft g l ld ll lt m mp n nd ng nk nt p r rd rk rm rn rt s sh sk ss st t th tt v x z".split()]
_ENDINGS = ["", "", "", "", *"s ed ing er ly y tion ment ness al ic ism able".split()]
_SYLLABLES = "ba be bi bo da de di do fa fi ga go ka ki la le lo lu ma mi mo na ne no pa pe po ra re ri ro sa se so ta te ti to va ve vi za zo".split()


@cache
def lists() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "words.toml").read_text())


@cache
def vocabulary() -> tuple[str, ...]:
    return tuple(dict.fromkeys(lists()["words"].split()))


def invented(rng: random.Random) -> str:
    """A word that does not exist."""
    if rng.random() < 0.4:
        return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4))) + rng.choice(("", "", "n", "r", "s", "k"))
    parts = (rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.randint(1, 3)))
    return "".join(parts) + rng.choice(_ENDINGS)


def any_word(rng: random.Random) -> str:
    return invented(rng) if rng.random() < 0.3 else rng.choice(vocabulary())


def spelling(rng: random.Random) -> Thread:
    """Spelling, turning around, first and last letter, number of letters."""
    word = any_word(rng)
    if len(word) > 8:
        word = rng.choice(vocabulary())
    quoted = rng.choice(_QUOTES).format(word)
    kind = rng.choice(("spell", "spell", "reverse", "first", "last", "length", "upper", "letter"))
    if kind == "spell":
        frames = ("Spell {q}.", "How do you spell {q}?", "Can you spell {q}?", "Please spell {q}.", "Spell {q} for me.", "How is {q} spelled?", "spell {q}")
        key = "-".join(word.upper())
        answer = fill(rng, ("{w} is spelled {k}.", "{w} is spelled {k}."), w=capital(word), k=key)
    elif kind == "reverse":
        if len(word) > 6:
            word = rng.choice([w for w in vocabulary() if len(w) <= 5])
            quoted = rng.choice(_QUOTES).format(word)
        frames = ("Reverse {q}.", "What is {q} backwards?", "Spell {q} backwards.", "Write {q} backwards.", "Turn {q} around.", "Say {q} backwards.")
        key = word[::-1]
        answer = f"{capital(word)} is {'-'.join(word.upper())}, and backwards that is {key}."
    elif kind == "first":
        frames = ("What is the first letter of {q}?", "Which letter does {q} start with?", "What letter does {q} begin with?", "First letter of {q}?")
        key = word[0].upper()
        answer = f"The first letter of {word} is {key}."
    elif kind == "last":
        frames = ("What is the last letter of {q}?", "Which letter does {q} end with?", "What letter does {q} end with?", "Last letter of {q}?")
        key = word[-1].upper()
        answer = f"The last letter of {word} is {key}."
    elif kind == "length":
        frames = ("How many letters does {q} have?", "How many letters are in {q}?", "How long is {q}?", "Count the letters in {q}.")
        key = f"{len(word)} letters"
        answer = f"{capital(word)} is {'-'.join(word.upper())}: it has {key}."
    elif kind == "upper":
        frames = ("Write {q} in capital letters.", "Write {q} in upper case.", "Say {q} in capitals.", "Put {q} in uppercase.")
        key = word.upper()
        answer = f"{key}"
    else:
        letter = rng.choice("abcdefghilmnoprstw")
        found = [w for w in vocabulary() if w[0] == letter]
        word = rng.choice(found)
        quoted = letter.upper()
        frames = ("Name a word that starts with {q}.", "Tell me a word that begins with {q}.", "Give me a word with {q}.", "A word that starts with {q}?")
        key = word
        answer = f"{capital(word)} starts with {letter.upper()}."
    return [Exchange(fill(rng, frames, q=quoted), answer, "spelling", key, exact=True)]


def rhyme(rng: random.Random) -> Thread:
    """Rhymes, opposites, plurals."""
    kind = rng.choice(("rhyme", "rhyme", "opposite", "opposite", "plural"))
    if kind == "rhyme":
        family = rng.choice(lists()["rhymes"]["families"]).split()
        word = rng.choice(family)
        found = rng.sample([w for w in family if w != word], min(3, len(family) - 1))
        frames = ("What rhymes with {q}?", "Find a rhyme for {q}.", "Which words rhyme with {q}?", "Give me a rhyme for {q}.", "Tell me words that rhyme with {q}.",
                  "Do you know a rhyme for {q}?", "A rhyme for {q}, please.", "rhymes with {q}", "What word rhymes with {q}?", "Can you rhyme {q}?")  # fmt: skip
        answer = f"{capital(join(found))} rhyme{'s' if len(found) == 1 else ''} with {word}."
        return [Exchange(fill(rng, frames, q=rng.choice(_QUOTES).format(word)), answer, "rhyme", "with " + word)]
    if kind == "opposite":
        pairs: dict[str, str] = lists()["opposites"]
        both = {**{b: a for a, b in pairs.items()}, **pairs}
        word = rng.choice(list(both))
        frames = ("What is the opposite of {q}?", "What's the opposite of {q}?", "The opposite of {q}?", "Name the opposite of {q}.", "Opposite of {q}?",
                  "Can you tell me the opposite of {q}?", "Give me the opposite of {q}.", "Which word means the opposite of {q}?", "What is the contrary of {q}?")  # fmt: skip
        answer = f"The opposite of {word} is {both[word]}."
        return [Exchange(fill(rng, frames, q=rng.choice(_QUOTES).format(word)), answer, "opposite", f"is {both[word]}.")]
    special: dict[str, str] = lists()["plurals"]
    if rng.random() < 0.7:
        word, many = rng.choice(list(special.items()))
    else:
        word = rng.choice("apple bear bird block boat book car cat chair cow cup dog door egg farm flower friend game hand hat king lamp map page queen road ship token tree".split())
        many = word + "s"
    frames = ("What is the plural of {q}?", "Plural of {q}?", "What's the plural of {q}?", "Give me the plural of {q}.", "How do you say more than one {w}?",
              "Tell me the plural of {q}.", "One {w}, two ...?")  # fmt: skip
    return [Exchange(fill(rng, frames, q=rng.choice(_QUOTES).format(word), w=word), f"The plural of {word} is {many}.", "plural", f"is {many}.")]


def world(rng: random.Random) -> Thread:
    """Colours, animals, capitals."""
    kind = rng.choice(("capital", "capital", "country", "colour", "sound", "legs", "home", "young"))
    if kind in ("capital", "country"):
        country, city = rng.choice(list(lists()["capitals"].items()))
        if kind == "capital":
            frames = ("What is the capital of {x}?", "What's the capital of {x}?", "Name the capital of {x}.", "Capital of {x}?", "Which city is the capital of {x}?",
                      "Do you know the capital of {x}?", "Tell me the capital of {x}.", "The capital of {x} is?", "what city is the capital of {x}")  # fmt: skip
            return [Exchange(fill(rng, frames, x=country), f"The capital of {country} is {city.rstrip('.')}.", "capital", city.rstrip("."))]
        frames = ("{x} is the capital of which country?", "Which country has the capital {x}?", "What country is {x} the capital of?")
        countries = [c for c, name in lists()["capitals"].items() if name == city]
        return [Exchange(fill(rng, frames, x=city), f"{city} is the capital of {countries[0]}.", "capital", countries[0])]
    if kind == "colour":
        thing, colour = rng.choice(list(lists()["colour_of"].items()))
        article = "an" if thing[0] in "aeiou" else "a"
        if thing in ("sky", "sun", "sea"):
            article = "the"
        name = thing if thing in ("grass", "snow", "coal", "milk", "blood", "chocolate") else f"{article} {thing}"
        frames = ("What colour is {x}?", "What color is {x}?", "Which colour does {x} have?", "What is the colour of {x}?", "What's the color of {x}?")
        return [Exchange(fill(rng, frames, x=name), f"{capital(name)} is {colour}.", "colour", colour)]
    if kind == "sound":
        animal, sound = rng.choice(list(lists()["sounds"].items()))
        article = "an" if animal[0] in "aeiou" else "a"
        frames = ("What sound does {x} make?", "What does {x} say?", "What noise does {x} make?", "How does {x} sound?", "Which sound does {x} make?")
        return [Exchange(fill(rng, frames, x=f"{article} {animal}"), f"{capital(article)} {animal} {sound}.", "animal", sound)]
    if kind == "legs":
        animal, legs = rng.choice(list(lists()["legs"].items()))
        article = "an" if animal[0] in "aeo" else "a"
        frames = ("How many legs does {x} have?", "How many legs has {x}?", "Number of legs of {x}?")
        count = str(legs) if legs else "no"
        return [Exchange(fill(rng, frames, x=f"{article} {animal}"), f"{capital(article)} {animal} has {count} legs.", "animal", f"{count} legs")]
    if kind == "home":
        animal, home = rng.choice(list(lists()["homes"].items()))
        animal = animal.replace("_", " ")
        article = "an" if animal[0] in "aeiou" else "a"
        frames = ("Where does {x} live?", "Where do I find {x}?", "What is the home of {x}?")
        return [Exchange(fill(rng, frames, x=f"{article} {animal}"), f"{capital(article)} {animal} lives in {home}.", "animal", home)]
    animal, young = rng.choice(list(lists()["young"].items()))
    article = "an" if animal[0] in "aeiou" else "a"
    frames = ("What is a young {x} called?", "What do you call a baby {x}?", "What is the young of {a} {x}?", "What is a baby {x} called?")
    return [Exchange(fill(rng, frames, x=animal, a=article), f"A young {animal} is called a {young}.", "animal", young)]


def listing(rng: random.Random) -> Thread:
    """Some members of a category."""
    name, members = rng.choice(list(lists()["categories"].items()))
    items = members.split()
    count = rng.randint(2, min(7, len(items)))
    words = ("two", "three", "four", "five", "six", "seven")
    number = words[count - 2] if rng.random() < 0.6 else str(count)
    chosen = rng.sample(items, count)
    frames = ("Name {k} {c}.", "List {k} {c}.", "Give me {k} {c}.", "Can you name {k} {c}?", "Tell me {k} {c}.", "Write a list of {k} {c}.", "Which {c} do you know? Name {k}.",
              "Please list {k} {c}.", "I need {k} {c}.", "Make a list of {k} {c}.", "{k} {c}, please")  # fmt: skip
    question = capital(fill(rng, frames, k=number, c=name))
    if "list" in question.lower():
        answer = "\n".join(f"{i}. {capital(item)}" for i, item in enumerate(chosen, 1))
    else:
        answer = capital(join(chosen)) + "."
    return [Exchange(question, answer, "list", chosen[-1])]


def repeat(rng: random.Random) -> Thread:
    """Say it after me."""
    count = rng.choice((1, 1, 2, 3, 3, 4, 5, 6, 8, 10, 12))
    words = [any_word(rng) if rng.random() > 0.08 else str(rng.randint(0, 999)) for _ in range(count)]
    text = " ".join(words)
    style = rng.random()
    if style < 0.3:
        text = capital(text)
    if style < 0.15:
        text += rng.choice(".!")
    frames = ("Say {t}", "Say: {t}", 'Say "{t}"', "Repeat after me: {t}", "Repeat: {t}", "Please repeat: {t}", "Please say {t}", "Write: {t}", 'Repeat "{t}"', "Echo {t}", "Echo: {t}",
              'Please say "{t}"', "Can you say {t}?", 'Say the words "{t}"', "Just say {t}", "repeat after me: {t}", "say {t}", 'Write "{t}"', "Copy this: {t}", "Type: {t}")  # fmt: skip
    frame = rng.choice(frames)
    if frame.endswith("?"):
        text = text.rstrip(".!")
    return [Exchange(frame.format(t=text), text, "repeat", text, exact=True)]


def memory(rng: random.Random) -> Thread:
    """Something told early in a conversation and asked for later (the corpus puts other turns between)."""
    kind = rng.choice(("name", "name", "name", "thing", "said", "unknown"))
    if kind == "name":
        name = rng.choice(_NAMES) if rng.random() < 0.7 else capital(invented(rng))
        told = ("My name is {n}.", "I am {n}.", "I'm {n}.", "Hello, my name is {n}.", "Hi, I'm {n}.", "Call me {n}.", "my name is {n}", "You can call me {n}.", "Hello, I am {n}!")
        asked = ("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?", "Do you know my name?", "what is my name", "Can you tell me my name?")
        hello = ("Nice to meet you, {n}!", "Hello, {n}! What can I do for you?", "Hi {n}! How can I help you?")
        return [
            Exchange(fill(rng, told, n=name), fill(rng, hello, n=name), "memory", name, exact=True),
            Exchange(rng.choice(asked), fill(rng, ("Your name is {n}.", "You are {n}."), n=name), "memory", name),
        ]
    if kind == "thing":
        what, value = rng.choice((("colour", rng.choice(lists()["categories"]["colours"].split())), ("number", str(rng.randint(1, 100))),
                                  ("animal", "the " + rng.choice("cat dog horse lion fox rabbit owl whale bear tiger mouse frog".split())),
                                  ("word", any_word(rng)), ("city", rng.choice(list(lists()["capitals"].values())).rstrip("."))))  # fmt: skip
        told = ("My favourite {w} is {v}.", "My favorite {w} is {v}.", "Remember: my favourite {w} is {v}.", "I like {v}. It is my favourite {w}.")
        asked = ("What is my favourite {w}?", "What's my favorite {w}?", "Do you remember my favourite {w}?", "Which {w} do I like best?")
        noted = ("I will remember that your favourite {w} is {v}.", "Good choice! Your favourite {w} is {v}.")
        return [
            Exchange(fill(rng, told, w=what, v=value), fill(rng, noted, w=what, v=value), "memory", value, exact=True),
            Exchange(fill(rng, asked, w=what), f"Your favourite {what} is {value}.", "memory", value, exact=True),
        ]
    if kind == "said":
        text = capital(" ".join(any_word(rng) for _ in range(rng.randint(2, 4)))) + "."
        asked = ("What did I just say?", "What was my last message?", "Repeat what I said.", "What did I write?")
        reply = ("I am not sure what you mean by that.", "What do you mean by that?", "I do not understand that. I am a tiny model.")
        return [
            Exchange(text, rng.choice(reply), "memory", exact=True),
            Exchange(rng.choice(asked), f'You said: "{text}"', "memory-now", text, exact=True),
        ]
    asked = ("What is my name?", "Do you know my name?", "Who am I?", "What's my name?", "Do you know who I am?")
    return [Exchange(rng.choice(asked), rng.choice(("You have not told me your name yet.", "I do not know. You have not told me yet.")), "memory", "not told", exact=True)]
