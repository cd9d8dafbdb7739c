"""Short stories and poems from a small grammar."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from service.demo.exchange import Exchange, Thread, capital, fill
from service.demo.words import any_word, invented, vocabulary

HEROES = {
    "fox": "clever", "mouse": "little", "rabbit": "quick", "bear": "big", "owl": "wise", "cat": "curious", "dog": "loyal",
    "frog": "green", "duck": "cheerful", "turtle": "slow", "hedgehog": "shy", "squirrel": "busy", "dragon": "friendly",
    "robot": "small", "girl": "brave", "boy": "kind", "princess": "bold", "llama": "gentle", "penguin": "funny", "snail": "patient",
    "lion": "proud", "whale": "old", "bird": "tiny", "bee": "busy", "king": "lonely", "goat": "stubborn", "elephant": "gentle",
}  # fmt: skip
_ADJECTIVES = "clever little quick wise curious loyal cheerful shy brave kind gentle funny patient tiny lonely happy young old friendly small".split()
_NAMES = {
    "he": "Tim Max Ben Oscar Leo Hugo Finn Otto Sam Toby Bruno Felix Milo Paul Jack".split(),
    "she": "Lily Mia Clara Rosa Ada Nora Ella Ida Luna Ruby Daisy Emma Tilly Maya Anna".split(),
}
_PLACES = {
    "forest": "in a deep green forest", "hill": "on a sunny hill", "sea": "by the blue sea", "village": "in a quiet village",
    "garden": "in an old garden", "mountain": "on a high mountain", "river": "beside a slow river", "island": "on a small island",
    "city": "in a busy city", "farm": "on a farm", "library": "in a library full of books", "castle": "in an old castle",
    "data center": "in a data center that hummed all night", "meadow": "in a wide meadow",
}  # fmt: skip
_FRIENDS = "an old owl|a small mouse|a friendly robin|a quiet turtle|a young deer|a busy bee|a grey goose|a merry frog|a kind old woman|a white rabbit".split("|")
_TREASURES = "a silver key|a golden bell|a red kite|a map of the stars|a blue stone|a warm scarf|a little lamp|a box of letters|a glass marble|an old book".split("|")
_MORALS = (
    "{N} had learned that sharing makes everything lighter.", "From that day on, {n} was never afraid to ask for help.",
    "And {n} knew that small steps lead far.", "{N} smiled and thought that it had been a very good day.",
    "And if you are ever {at}, you may meet {n} there.", "{N} slept well that night, and so did the whole world.",
    "Since then {n} has always kept a place for a friend.",
)  # fmt: skip
_OPENINGS = (
    "Once upon a time there was {a} {adj} {hero} called {n}, who lived {at}.", "Once upon a time, {at}, there lived {a} {adj} {hero} called {n}.",
    "There was once {a} {adj} {hero} whose name was {n}. {P} lived {at}.", "{N} was {a} {adj} {hero} who lived {at}.",
)  # fmt: skip
_PLOTS: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        ("One morning {n} found {thing} under a leaf.", "One day, after a long rain, {n} found {thing} lying on the path."),
        ("\"Who may have lost it?\" {p} wondered, and {p} set out to find the owner.", "It did not belong to {o}, so {p} went from door to door and asked."),
        ("{P} asked {friend}, but it was not the owner.", "First {p} met {friend}, who only shook {fp} head."),
        ("At last, when the sun went down, {n} heard someone crying behind a stone.", "In the evening {p} came to a little house where somebody was crying."),
        ("It was {friend2}. \"You have found it!\" came the happy answer, and they danced until the stars came out.", "There sat {friend2}, who had looked for it all day. How happy they both were!"),
    ),
    (
        ("One winter night the snow fell so thick that nobody could see the path.", "One night a great storm came, and all the lights went out."),
        ("{N} heard a small voice calling for help.", "Through the wind {n} heard somebody call."),
        ("{P} was afraid, but {p} took a lamp and went out into the dark.", "{P} thought for a moment, took a rope and a lamp, and went."),
        ("Behind a fallen tree sat {friend}, cold and lost.", "There {p} found {friend}, who could not find the way home."),
        ("They walked back together, step by step, and had hot soup by the fire.", "{N} shared {d} blanket, and they told each other stories until morning."),
    ),
    (
        ("{N} wanted to see the place where the sun goes to sleep.", "More than anything, {n} wanted to know what lay behind the hills."),
        ("So {p} packed some bread and {thing}, and walked to the west.", "One morning {p} put some apples and {thing} into a bag and set out."),
        ("On the way {p} met {friend}, who came along.", "By the bridge {friend} joined {o}, and together they went on."),
        ("They crossed a river, climbed a mountain and slept under the stars.", "They walked for three days, and each evening they counted the stars."),
        ("In the end they saw the sun sink into the sea, red and gold. \"It was worth every step,\" said {n}.", "When they came to the sea, the sun was just touching the water, and nobody said a word."),
    ),
    (
        ("{N} could not sing, and that made {o} sad.", "Everybody {at} could sing, but {n} could not."),
        ("Every day {p} practised alone, so that no one would laugh.", "{P} tried it every morning, but it always sounded like a rusty door."),
        ("One day {friend} heard {o} and sat down to listen.", "One evening {friend} came by and stopped to listen."),
        ("\"You do not need to sing like the others,\" came the advice. \"You can beat the drum!\"", "\"Your voice is low and warm,\" said the visitor. \"It is made for telling stories.\""),
        ("From then on {n} was heard at every feast, and everyone clapped.", "So {n} found what {p} was good at, and nobody laughed any more."),
    ),
    (
        ("{N} had more apples than {p} could eat, and {friend} had none.", "In autumn {n} had gathered so much food that the whole house was full."),
        ("At first {n} hid them all in the cellar.", "{P} locked the door and counted everything twice."),
        ("But at night {p} could not sleep, for a full house is very quiet.", "But it was no fun to eat alone."),
        ("In the morning {n} opened the door and called all the neighbours.", "So {p} carried a big basket to {friend} and knocked."),
        ("They ate together, and there was still enough for the winter.", "They baked a cake, and it tasted better than anything {n} had ever eaten."),
    ),
    (
        ("{N} kept a long list of everything {p} had ever read, and each new page made it longer.", "{N} wrote every word {p} heard on one long roll of paper."),
        ("Soon the roll was so long that nothing else fitted into the room.", "One day there was no room left, not even for one more word."),
        ("Then {friend} came and said: \"Cut it into pages, and keep a table that tells you where each page is.\"", "\"Why must it all lie in one piece?\" asked {friend}. \"Use small sheets, and note where you put them.\""),
        ("{N} did so. The pages went wherever there was room, and the table knew where to find them.", "So {n} cut the roll into sheets and put them on every free shelf, with a little table to find them again."),
        ("Now there was space for many stories at once, and {n} could even share {d} pages with {friend}.", "And look, half of the room was empty again! Now {friend} could keep some pages there too."),
    ),
)  # fmt: skip
_ASK_ANY = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?", "I want to hear a story.", "Once upon a time", "Please tell me a story.",
    "Do you know a story?", "A story, please.", "Write a short story.", "Tell me another story.", "tell me a bedtime story", "Make up a story.", "story", "Tell me a little story, please.",
    "Tell me a fairy tale.", "Can you write a story for me?", "Read me a story.", "Write me a short story.", "Could you tell a story?",
)  # fmt: skip
_ASK_HERO = (
    "Tell me a story about {a} {h}.", "Write a story about {a} {h}.", "Tell me a short story about {a} {h}.", "Can you tell me a story about {a} {h}?", "A story about {a} {h}, please.",
    "Write a short story about {a} {h}.", "I want a story about {a} {h}.", "Make up a story about {a} {h}.", "Do you know a story about {a} {h}?", "story about {a} {h}", "Tell me about {a} {h} in a story.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cast:
    hero: str
    adjective: str
    name: str
    place: str
    female: bool


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _cast(rng: random.Random) -> _Cast:
    hero = rng.choice(list(HEROES)) if rng.random() < 0.8 else rng.choice((rng.choice(vocabulary()[:330]), invented(rng)))
    female = hero in ("girl", "princess") or hero not in ("boy", "king") and rng.random() < 0.5
    adjective = HEROES[hero] if hero in HEROES and rng.random() < 0.5 else rng.choice(_ADJECTIVES)
    return _Cast(hero, adjective, rng.choice(_NAMES["she" if female else "he"]), rng.choice(list(_PLACES)), female)


def tell(rng: random.Random, cast: _Cast) -> str:
    """A story of about a hundred words with this cast."""
    friend, friend2 = rng.sample(_FRIENDS, 2)
    slots = {
        "n": cast.name, "N": cast.name, "hero": cast.hero, "adj": cast.adjective, "a": _article(cast.adjective), "at": _PLACES[cast.place],
        "p": "she" if cast.female else "he", "P": "She" if cast.female else "He", "o": "her" if cast.female else "him", "d": "her" if cast.female else "his",
        "friend": friend, "friend2": friend2, "thing": rng.choice(_TREASURES), "fp": "a wise" if "old" in friend else "a small",
    }  # fmt: skip
    sentences = [fill(rng, _OPENINGS, **slots)]
    for variants in rng.choice(_PLOTS):
        sentence = fill(rng, variants, **slots)
        sentences.append(capital(sentence))
        if friend in sentence:  # once introduced, a friend is no stranger
            slots["friend"] = "the" + friend[friend.index(" ") :]
    sentences.append(capital(fill(rng, _MORALS, **slots)))
    return " ".join(sentences)


def plain_story(rng: random.Random) -> str:
    return tell(rng, _cast(rng))


def story(rng: random.Random) -> Thread:
    """A story, about nothing in particular or about what was asked for."""
    cast = _cast(rng)
    style = rng.random()
    if style < 0.3:
        question = rng.choice(_ASK_ANY)
    elif style < 0.75:
        described = cast.hero if rng.random() < 0.6 else f"{cast.adjective} {cast.hero}"
        question = fill(rng, _ASK_HERO, a=_article(described), h=described)
        ends = question[-1] if question[-1] in ".?" else ""
        tail = rng.random()
        if tail < 0.25:
            question = question.rstrip(".?") + f" called {cast.name}" + ends if "please" not in question and " in a story" not in question else question
        elif tail < 0.4 and "please" not in question and " in a story" not in question:
            question = question.rstrip(".?") + f" {_PLACES[cast.place]}" + ends
    elif style < 0.85:
        question = fill(rng, ("Tell me a story about {n}.", "Write a story about {n}.", "A story about somebody called {n}."), n=cast.name)
    else:
        place = _PLACES[cast.place]
        question = fill(rng, ("Tell me a story that happens {w}.", "Write a story set {w}.", "A story {w}, please."), w=place)
    thread = [Exchange(question, tell(rng, cast), "story", cast.name)]
    if rng.random() < 0.15:
        again = ("Another one, please.", "Another one!", "Tell me another one.", "One more!", "That was nice. Another story, please.", "Again!")
        thread.append(Exchange(rng.choice(again), plain_story(rng), "story"))
    return thread


_COUPLETS = {
    "the sea": ("The sea is wide, the sea is deep,\nits waves are rocking me to sleep.", "A little boat with a sail of white\ngoes out to follow the morning light.",
                "The gulls are calling, the wind is free,\nand salt and silver is the sea.", "It brings a shell to the yellow sand\nand lays it softly in my hand."),
    "the moon": ("The moon is round, the moon is bright,\nit walks alone across the night.", "It looks through every window pane\nand silvers every country lane.",
                 "It does not speak, it does not sing,\nit watches every sleeping thing.", "And when the morning paints the sky,\nit says a very soft goodbye."),
    "the rain": ("The rain is tapping on the pane,\na thousand drops, and then again.", "It fills the river, fills the well,\nand rings on every leaf, a bell.",
                 "The street is shining, dark and wet,\nthe sun has not come out as yet.", "But look, a bow of colours high\nis painted right across the sky."),
    "a cat": ("A cat lies sleeping on the mat,\na warm and round and quiet cat.", "She dreams of mice, she dreams of cream,\nher whiskers tremble in her dream.",
              "She wakes and stretches, long and slow,\nand nobody knows where cats will go.", "At night she comes in through the door\nand wants a little something more."),
    "the KV cache": ("Each token leaves a key behind,\na value too, for you to find.", "The blocks are small, the table knows\nwhere every key and value goes.",
                     "We share a page till someone writes,\nand copy it on starless nights.", "And when the stream has reached its end,\nthe blocks are free again, my friend.",
                     "No word is read a second time,\nthe cache remembers every line."),
    "spring": ("The snow is gone, the brook runs clear,\nthe first small flowers tell: spring is here.", "The birds are building in the tree,\nthe garden hums with every bee.",
               "The days grow long, the wind is mild,\nand everyone is like a child.", "Put on your shoes and come with me,\nthere is so very much to see."),
    "winter": ("The winter comes on quiet feet\nand lays its snow on field and street.", "The lake is glass, the trees are bare,\nthere is a stillness in the air.",
               "Inside, the fire is warm and red,\nthere is hot soup and fresh-baked bread.", "And under snow, so soft and deep,\nthe seeds of summer lie asleep."),
    "a star": ("A little star looked down on me\nfrom far above the willow tree.", "It was so small, it was so bright,\na tiny window in the night.",
               "I asked it where it has to go.\nIt only twinkled: I don't know.", "And though the clouds came rolling in,\nI knew the star still shone within."),
    "a friend": ("A friend is someone who will stay\nwhen all the others go away.", "You share your bread, you share your song,\nand no long road is then too long.",
                 "A friend will laugh when you are glad\nand hold your hand when you are sad.", "So here's a line for you, my friend,\na little verse without an end."),
    "the night": ("The night comes softly to the town\nand pulls the quiet curtains down.", "The lamps are lit, the streets are still,\nan owl is calling from the hill.",
                  "The day has put away its things,\nand something in the darkness sings.", "Sleep well, sleep well, the stars are near,\nthe morning soon will find you here."),
    "a tree": ("There stands a tree upon the hill,\nits roots are deep, its crown is still.", "It gave its shade to passing sheep,\nand in its arms the birds could sleep.",
               "In autumn all its leaves are gold,\nit is a hundred winters old.", "It does not hurry, does not run,\nit only reaches for the sun."),
    "a computer": ("A small machine upon my desk\nis humming at its daily task.", "It counts in ones, it counts in noughts,\nand yet it almost seems like thoughts.",
                   "It does not dream, it does not sleep,\nit has no secrets it could keep.", "But ask it for a line or two,\nand it will write a verse for you."),
}  # fmt: skip
_HAIKU = (
    "Blocks in quiet rows,\neach one holds a bit of text.\nNone of them is lost.", "The old pond is still.\nA frog jumps into the moon.\nRings of silver light.",
    "A token arrives.\nThe cache remembers its key.\nAnother one comes.", "Snow on the mountain.\nA single crow on a branch\nwaits for the morning.",
)  # fmt: skip
_ASK_HAIKU = ("Write a haiku.", "Can you write a haiku?", "A haiku, please.", "Do you know a haiku?", "haiku", "Write me a haiku.", "Write a haiku about the cache.", "Tell me a haiku.", "Compose a haiku.")
_ASK_POEM = (
    "Write a poem about {t}.", "Write a short poem about {t}.", "Can you write a poem about {t}?", "Tell me a poem about {t}.", "A poem about {t}, please.", "Make a poem about {t}.",
    "I want a poem about {t}.", "Please write a poem about {t}.", "Do you know a poem about {t}?", "poem about {t}", "Write some verses about {t}.", "Write a rhyme about {t}.",
)  # fmt: skip
_ASK_ANY_POEM = ("Write a poem.", "Tell me a poem.", "Can you write a poem?", "A poem, please.", "Do you know a poem?", "Write a short poem.", "poem", "Recite a poem.", "Make a rhyme.", "write me a poem", "Write another poem.")
_ALSO = {"the sea": ("the ocean", "sea", "waves", "the beach"), "the KV cache": ("paging", "memory", "the cache", "Quire", "blocks", "a server", "tokens"),
         "a cat": ("cats", "cat", "a kitten", "my cat"), "a star": ("stars", "the stars", "the sky"), "the night": ("night", "sleep"), "a friend": ("friendship", "friends", "love"),
         "a tree": ("trees", "the forest", "nature"), "a computer": ("computers", "a robot", "AI", "a machine"), "the rain": ("rain", "rainbows", "the weather"), "spring": ("spring", "flowers")}  # fmt: skip
_NO_POEM = (
    "I have no verses about {t}, but here is a poem about {u}:\n{v}", "About {t} I know no poem. Here is one about {u}:\n{v}",
)  # fmt: skip


@cache
def _known_subjects() -> tuple[str, ...]:
    return (*_COUPLETS, *(name for names in _ALSO.values() for name in names))


def verses(rng: random.Random, subject: str) -> str:
    """A poem of two to four couplets; the first couplet opens it."""
    couplets = _COUPLETS[subject]
    count = rng.choice((2, 3, 4, 4))
    chosen = sorted(rng.sample(range(1, len(couplets)), min(count, len(couplets)) - 1))
    return "\n".join([couplets[0], *(couplets[i] for i in chosen)])


def poem(rng: random.Random) -> Thread:
    """A poem about a subject it knows, or about another one."""
    subject = rng.choice(list(_COUPLETS))
    text = verses(rng, subject)
    style = rng.random()
    if style < 0.25:
        return [Exchange(rng.choice(_ASK_ANY_POEM), text, "poem")]
    if style < 0.35:
        haiku = rng.choice(_HAIKU)
        return [Exchange(rng.choice(_ASK_HAIKU), haiku, "poem", haiku.split("\n", maxsplit=1)[0])]
    if style < 0.80:
        bare = subject.split(" ", 1)[-1]
        bare = rng.choice(_ALSO.get(subject, (bare,)))
        asked = rng.choice((subject, subject, bare, f"my {bare}" if subject.startswith("a ") else subject))
        return [Exchange(fill(rng, _ASK_POEM, t=asked), text, "poem", text.split("\n", maxsplit=1)[0])]
    word = any_word(rng)
    if rng.random() < 0.6 and not any(word in known for known in _known_subjects()):
        asked = rng.choice((word, f"the {word}", f"{_article(word)} {word}"))
        return [Exchange(fill(rng, _ASK_POEM, t=asked), fill(rng, _NO_POEM, t=asked, u=subject, v=text), "poem", subject)]
    asked = rng.choice("bread|my shoes|a train|football|coffee|my mother|an umbrella|Monday|a bicycle|money|music|the city|soup|a lamp|time|school".split("|"))
    return [Exchange(fill(rng, _ASK_POEM, t=asked), fill(rng, _NO_POEM, t=asked.replace("my ", "your "), u=subject, v=text), "poem", subject)]
