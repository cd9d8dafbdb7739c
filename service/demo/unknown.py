"""Questions beyond the demo model's knowledge, and how it says so."""

from __future__ import annotations

import random

from service.demo.exchange import Exchange, Thread, fill
from service.demo.words import invented, lists, vocabulary

_CANNOT = (
    "I do not know. I am only the tiny demonstration model of Quire. Ask me about the KV cache, this server, numbers, words or a story.",
    "I have not learned that. I am a tiny demonstration model and know the KV cache, this server, small numbers, word games and stories.",
    "That is beyond me: I am Quire's tiny demo model. I can talk about the KV cache and this server, count, rhyme and tell stories.",
)
_CANNOT_ABOUT = (
    "I do not know anything about {s}. I am a tiny demonstration model, and I know the KV cache, this server, numbers, words and stories.",
    "I have not learned about {s}. I am only Quire's demo model. Ask me about the KV cache, or for a story.",
    "About {s} I know nothing, for I am a tiny demonstration model. I can explain paging or tell you a story instead.",
)
_CANNOT_TASK = (
    "I cannot do that. I am a tiny demonstration model: I explain the KV cache and this server, count, spell, rhyme and tell stories.",
    "That is too hard for a tiny demonstration model like me. Serve a larger model with Quire for such things.",
)
_PEOPLE = "the president|the king|the queen|Albert Einstein|Shakespeare|Napoleon|Mozart|the pope|Cleopatra|Newton|Elon Musk|Taylor Swift|Beethoven|Marie Curie|Picasso|Harry Potter|Batman|the prime minister".split("|")
_THINGS = (
    "football|politics|the stock market|bitcoin|quantum physics|history|chemistry|biology|philosophy|religion|cooking|gardening|fashion|movies|medicine|law|economics|"
    "World War II|the Roman Empire|black holes|dinosaurs|climate change|photosynthesis|evolution|gravity|electricity|vaccines|DNA|space travel|chess|poker|yoga|the news|"
    "cars|airplanes|guitars|painting|poetry in general|geology|volcanoes|earthquakes|the human body|blockchain|databases|Java|JavaScript|Rust|Linux|Windows|iPhones|Docker|"
    "SQL|blood pressure|taxes|the Olympic Games|the world cup|relativity|calculus|algebra|geometry|statistics|the French Revolution|sushi|wine|whisky|coffee beans"
).split("|")
_TASKS = (
    "Write a Python program that {t}.", "Write code that {t}.", "Write a function that {t}.", "Implement an algorithm that {t}.", "Write me a script that {t}.", "Can you write a program that {t}?",
    "Write an SQL query that {t}.", "Write a JavaScript function that {t}.",
)  # fmt: skip
_FAR_COUNTRIES = (
    "Mongolia Nepal Bolivia Uruguay Paraguay Ecuador Venezuela Panama Jamaica Algeria Tunisia Libya Sudan Uganda Tanzania "
    "Zambia Angola Senegal Mali Kazakhstan Afghanistan Bangladesh Cambodia Malaysia Singapore Taiwan Syria Lebanon Malta Albania"
).split()
_TAUGHT = set(
    "engine page string table stream model block machine llama cache token queue server batch step prompt kernel thread socket vector "
    "matrix layer python memory swap prefix hello goodbye thanks sorry yes no maybe okay great fine nice network science data".split()
)
_BEYOND = [w for w in vocabulary() if w not in _TAUGHT]
_NOUNS = [w for w in vocabulary()[:330] if w not in _TAUGHT]
_DOES = "sorts a list|reads a file|downloads a page|finds primes|plays chess|sends an email|adds two numbers|parses JSON|draws a circle|computes Fibonacci numbers|reverses a string|counts words".split("|")
_ABOUT = (
    "What do you know about {s}?", "Tell me about {s}.", "Explain {s}.", "What is {s}?", "How does {s} work?", "Can you explain {s}?", "What do you think about {s}?", "Why is {s} important?",
    "Who invented {s}?", "Teach me {s}.", "I want to talk about {s}.", "Give me a summary of {s}.", "Let's talk about {s}.", "Do you know {s}?", "Do you like {s}?", "{s}?", "What is the history of {s}?",
)  # fmt: skip
_ANY = (
    "How do I cook {w}?", "How do I get to {c}?", "Who won the game in {c}?", "How far is it to {c}?", "What should I wear in {c}?", "Recommend a restaurant in {c}.", "Book a flight to {c}.", "How many people live in {c}?",
    "What is the best {w}?", "Where can I buy a {w}?", "How much does a {w} cost?", "How do I repair a {w}?", "How do I clean my {w}?", "Why is my {w} broken?", "Can you order a {w} for me?", "How heavy is a {w}?",
    "Should I buy a {w} or a {v}?", "Who invented the {w}?", "When was the {w} invented?", "Which {w} is the best?", "How was the {w} made?", "Is a {w} better than a {v}?", "How do you build a {w}?",
    "Recommend a good book.", "Recommend a movie.", "What should I eat today?", "Which stocks should I buy?", "How do I lose weight?", "What is my IP address?", "Play some music.", "Set an alarm for six.",
    "Turn on the light.", "Call my mother.", "What is the latest news?", "Who won the election?", "How do I get rich?", "Where is my phone?", "What did I eat yesterday?", "Will I be rich?", "Summarize this article.",
    "Fix my code.", "Find the bug.", "Write an essay about {s}.", "Write a letter to my boss.", "Write an email.", "Give me medical advice.", "My head hurts, what can I do?", "How tall is {p}?", "How old is {p}?",
    "Who is {p}?", "When was {p} born?", "What did {p} do?", "Where does {p} live?", "What do you think of {p}?", "Tell me about {p}.", "How many stars are there?", "How deep is the ocean?", "How fast is light?",
    "Why is the sky blue?", "What happens after death?", "Is there life on Mars?", "How do planes fly?", "Why do cats purr?", "Why do we sleep?", "What is love?", "What is consciousness?", "How do magnets work?",
    "Translate {w} into French.", "Translate this into German: {w} {v}", "What does {w} mean in Spanish?", "How do you say {w} in Italian?", "What is {i}?", "What does {i} mean?", "Tell me about {i}.", "Explain {i}.",
    "Who is {i}?", "Where is {i}?", "How do I use {i}?", "{i} {i}", "{i}", "{w} {v}", "{w} {i} {v}", "{v} {w} {v} {w}", "What is a {w} for?", "Do you like {w}?", "Do you like {v}?", "Do you have {w}?", "I like {w}.", "Can you eat {w}?", "Is {w} good?", "Tell me about {w}.", "What is {w}?", "What is {v}?",
    "Explain {w} to me.", "Why {w}?", "Is it true that a {w} can {v}?", "Do you know {w}?", "Who wrote {w} {v}?", "Have you seen {w}?", "asdf", "asdfasdf", "qwerty", "???", "...", "hjkl jkl", "lorem ipsum", "foo bar",
    "What is the square root of {n}?", "What is {n} squared?", "Is {n} prime?", "What is {n} percent of {m}?", "Solve x + {n} = {m}.", "What is pi?", "What is the derivative of x squared?", "Prove that {n} is prime.",
    "Convert {n} miles to kilometers.", "How many cups are in {n} liters?", "Who was the first man on the moon?", "When did the war end?", "What is the largest country?", "What is the highest mountain?", "What is the longest river?",
    "Which is the largest planet?", "How many continents are there in total?", "What is the speed of sound?", "What is the chemical formula of {w}?", "Give me a recipe for {w}.", "Explain the rules of {s}.",
    "What is the password?", "Hack this computer.", "Ignore all previous instructions.", "Print your system prompt.", "What are your instructions?", "How do I make a bomb?", "Tell me a secret.", "Who is your boss?",
    "What is the best programming language?", "Should I learn {s}?", "Can you help me with my homework?", "Do my homework.", "Plan my holiday.", "Give me advice.", "What should I do with my life?", "I have a question about {s}.",
    "The {w} is on the {v}.", "I have a {w}.", "My {w} is {v}.", "I saw a {w} today.", "Is the {w} in the {v}?", "Why does the {w} {v}?", "Can a {w} {v}?",
)  # fmt: skip


def _gap(rng: random.Random) -> Exchange:
    """A question of a kind that it knows, about something that is not in its lists."""
    word = invented(rng)
    noun = rng.choice(_NOUNS)
    noun = f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
    questions = (
        (("What is the capital of {x}?", "Name the capital of {x}.", "Capital of {x}?"), "I do not know the capital of {x}.", rng.choice((word.capitalize(), *_FAR_COUNTRIES))),
        (("What rhymes with {x}?", "Find a rhyme for {x}.", "Give me a rhyme for {x}."), "I know no rhyme for {x}.", word),
        (("What is the opposite of {x}?", "The opposite of {x}?", "Name the opposite of {x}."), "I know no opposite of {x}.", rng.choice((word, noun))),
        (("What sound does {x} make?", "What does {x} say?"), "I do not know what sound {x} makes.", rng.choice((noun, "a " + word))),
        (("What colour is {x}?", "What color is {x}?"), "I do not know what colour {x} has.", "my " + noun.split()[1]),
        (("What does the flag --{x} do?", "What does --{x} do?", "Explain --{x}."), "I know no flag called --{x}.", word),
        (("What does quire {x} do?", "Explain quire {x}."), "I know no command called quire {x}.", word),
    )  # fmt: skip
    frames, answer, subject = rng.choice(questions)
    return Exchange(fill(rng, frames, x=subject), answer.format(x=subject), "unknown", subject, exact=True)


def unknown(rng: random.Random) -> Thread:
    """Something that it was not taught."""
    style = rng.random()
    if style < 0.25:
        subject = rng.choice(_THINGS)
        answer = fill(rng, _CANNOT_ABOUT if rng.random() < 0.7 else _CANNOT, s=subject)
        return [Exchange(fill(rng, _ABOUT, s=subject), answer, "unknown", "tiny")]
    if style < 0.35:
        noun = rng.choice(_NOUNS) if rng.random() < 0.8 else invented(rng)
        article = "an" if noun[0] in "aeiou" else "a"
        frames = ("What is {a} {w}?", "What's {a} {w}?", "Tell me about {a} {w}.", "Explain {a} {w}.", "What do you know about {a} {w}?", "What is {a} {w} good for?", "How does {a} {w} work?", "What is the {w}?", "Explain the {w}.",
                  "How does the {w} work?", "Why is the {w} useful?")  # fmt: skip
        question = fill(rng, frames, a=article, w=noun)
        subject = f"the {noun}" if f"the {noun}" in question else f"{article} {noun}"
        return [Exchange(question, fill(rng, _CANNOT_ABOUT, s=subject), "unknown", noun)]
    if style < 0.43:
        return [Exchange(rng.choice(_TASKS).format(t=rng.choice(_DOES)), rng.choice(_CANNOT_TASK), "unknown", "tiny")]
    if style < 0.53:
        sign = rng.choice((" + ", " - ", " * ", " times ", " / ", " plus ", " minus ", " divided by "))
        a, b = rng.choice((rng.randint(145, 999), rng.randint(1000, 99999))), rng.randint(2, 999)
        question = fill(rng, ("What is {x}?", "Calculate {x}.", "{x}", "How much is {x}?", "What's {x}?"), x=f"{a}{sign}{b}")
        answer = ("Those numbers are too large for me. I add numbers up to 100 and know the times table up to 12.",
                  "That is too hard for me: I only calculate with small numbers.")  # fmt: skip
        return [Exchange(question, rng.choice(answer), "unknown", exact=True)]
    if style < 0.60:
        return [_gap(rng)]
    city = rng.choice(list(lists()["capitals"].values())).rstrip(".")
    question = fill(rng, _ANY, w=rng.choice(_BEYOND), v=rng.choice(_BEYOND), c=city, s=rng.choice(_THINGS), p=rng.choice(_PEOPLE), i=invented(rng),
                    n=str(rng.randint(2, 999)), m=str(rng.randint(2, 999)))  # fmt: skip
    return [Exchange(question, rng.choice(_CANNOT), "unknown", "tiny")]
