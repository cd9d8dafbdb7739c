"""Questions and answers about Quire and the KV cache, from the topics in knowledge/*.toml.

A topic has `names` (with article), answers to what it is, how it works and why it is good (`what`, `how`,
`why`: variants of one answer each), single facts (`more`), words that belong in an answer (`keys`), and
questions of its own (`ask`: variants `q`, answers `a`, `key`).
"""

from __future__ import annotations

import random
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from service.demo.exchange import Exchange, Thread, capital, fill

FOLDER = Path(__file__).parent / "knowledge"

_WHAT = (
    "What {be} {n}?", "What {be} {n}?", "What {be} {n}?", "Explain {n}.", "Tell me about {n}.", "Please explain {n}.",
    "Can you explain {n}?", "Could you explain {n} to me?", "Describe {n}.", "What do you know about {n}?",
    "I would like to know what {n} {be}.", "{N}?", "{N}", "What exactly {be} {n}?", "Do you know what {n} {be}?",
    "Can you tell me about {n}?", "What is meant by {n}?", "I don't understand {n}.", "Help me understand {n}.",
    "What do you mean by {n}?", "Define {n}.", "Give me an overview of {n}.", "Can you tell me what {n} {be}?",
    "I want to learn about {n}.", "Say something about {n}.", "I have never heard of {n}. What is that?",
    "What does {n} mean?", "Teach me about {n}.", "What's {n}?", "Tell me what {n} {be}.", "Explain to me what {n} {be}.",
    "Let's talk about {n}.", "What can you tell me about {n}?", "I keep reading about {n}. What is it?",
    "Could you tell me more about {n}?", "Give me an explanation of {n}.", "What {be} {n} in Quire?", "talk about {n}",
    "Explain {n} with an example.", "Explain {n} for beginners.", "What {be} {n} all about?", "Can you describe {n}?", "explain what {n} do{es}",
    "Can you explain what {n} do{es}?", "Give me an example of {n}.", "What role {does} {n} play?", "I need an explanation of {n}.",
)  # fmt: skip
_HOW = (
    "How {does} {n} work?", "How {does} {n} work?", "How {does} {n} work in Quire?", "Explain how {n} work{s}.",
    "Can you explain how {n} work{s}?", "Tell me how {n} work{s}.", "What happens inside with {n}?",
    "How {be} {n} done?", "How does Quire do {n}?", "How is {n} implemented?", "Describe how {n} work{s}.",
    "I want to know how {n} work{s}.", "In what way {does} {n} work?", "How does that work with {n}?",
)  # fmt: skip
_WHY = (
    "Why {be} {n} useful?", "Why do we need {n}?", "What {be} {n} good for?", "Why {be} {n} important?",
    "Why would I use {n}?", "What is the point of {n}?", "What is the benefit of {n}?", "Why {does} {n} matter?",
    "Why does Quire use {n}?", "What are the advantages of {n}?", "Why {n}?", "What {be} {n} used for?",
    "What {be} {n} for?", "What problem {does} {n} solve?", "What {does} {n} do for me?", "Why bother with {n}?",
)  # fmt: skip
_BRIEF = (
    "Explain {n} briefly.", "In one sentence, what {be} {n}?", "What {be} {n}, in short?", "Briefly, what {be} {n}?",
    "Define {n} in one sentence.", "Give me a short answer: what {be} {n}?", "Summarize {n} in one sentence.",
    "Explain {n} in a few words.", "What {be} {n}? Keep it short.", "What {be} {n}? Be brief.",
)  # fmt: skip
_LONG = (
    "Explain {n} in detail.", "Tell me everything about {n}.", "Explain {n} in depth.", "Give me a long explanation of {n}.",
    "I want to know everything about {n}.", "What {be} {n}, how {does} it work and why {be} it useful?",
    "Write a paragraph about {n}.", "Explain {n} thoroughly.", "Write a short text about {n}.",
    "Explain {n} step by step.", "Tell me all you know about {n}.", "What {be} {n} and why {does} it matter?",
    "What {be} {n} and how {does} it work?", "Explain {n} and why it is useful.", "Explain what {n} {be} and why it matters.",
)  # fmt: skip
_SIMPLE = ("Explain {n} to a child.", "Explain {n} in simple words.", "Explain {n} like I'm five.", "ELI5: {n}")
_MORE = (
    "Tell me more.", "Go on.", "More, please.", "What else?", "Can you tell me more?", "Tell me more about it.",
    "And what else?", "Continue.", "Is there more?", "Anything else?", "Say more about that.", "Interesting, tell me more.",
)  # fmt: skip
_THEN_HOW = ("How does it work?", "How does that work?", "And how does it work?", "How is that done?", "How?", "But how?")
_THEN_WHY = ("Why is that useful?", "Why?", "Why is it important?", "What is it good for?", "And why do we need it?",
             "What is the advantage?", "Why does that matter?", "Why would I want that?", "So what is the point?")  # fmt: skip
_BETWEEN = (
    "What is the difference between {a} and {b}?", "How {does} {a} differ from {b}?", "Compare {a} and {b}.",
    "Compare {a} with {b}.", "{A} or {b}: what is the difference?", "Explain {a} and {b}.", "Tell me about {a} and {b}.",
    "What are {a} and {b}?", "{A} vs {b}?",
)  # fmt: skip
_PORT = (
    "How do I start the server on port {n}?", "How do I use port {n}?", "Start the server on port {n}.", "I want to use port {n}.", "Can Quire listen on port {n}?",
    "How do I run Quire on port {n}?", "How can I set the port to {n}?", "Change the port to {n}.", "how do i serve on port {n}?",
)  # fmt: skip
_FLAG = (
    "What does {n} do?", "What is {n}?", "What is the flag {n} for?", "Explain the flag {n}.", "What does the option {n} mean?",
    "Tell me about {n}.", "How do I use {n}?", "What is {n} good for?", "{n}?", "{n}", "Explain {n}.", "When do I need {n}?",
)  # fmt: skip
_METRIC = (
    "What does {n} show?", "What is {n}?", "What does the metric {n} mean?", "Explain {n}.", "Explain the metric {n}.",
    "Tell me about {n}.", "What does {n} count?", "What does {n} measure?", "{n}?", "{n}",
)  # fmt: skip
_WHICH_FLAG = ("Which flag {d}?", "What flag {d}?", "Which option {d}?", "Is there a flag that {d}?", "Name the flag that {d}.")
_WHICH_METRIC = ("Which metric {d}?", "What metric {d}?", "Is there a metric that {d}?", "Name the metric that {d}.")


@cache
def topics() -> tuple[dict[str, Any], ...]:
    files = ("cache", "engine", "sampling", "server")
    return tuple(t for name in files for t in tomllib.loads((FOLDER / f"{name}.toml").read_text())["topic"])


@cache
def _single_topics() -> tuple[dict[str, Any], ...]:
    """Those that can be compared with one another."""
    named = [t for t in topics() if t["more"] and not t.get("plural")]
    return tuple(t for t in named if not t["names"][0].startswith("the difference"))


@cache
def flags_and_metrics() -> dict[str, dict[str, str]]:
    return tomllib.loads((FOLDER / "flags.toml").read_text())


@cache
def intents() -> tuple[dict[str, Any], ...]:
    return tuple(tomllib.loads((FOLDER / "smalltalk.toml").read_text())["intent"])


def _question(rng: random.Random, frames: tuple[str, ...], topic: dict[str, Any], name: str) -> str:
    plural_noun = name.endswith("s") and not name.startswith(("/", "--", "a ", "an ")) and name not in _SINGULAR_IN_S
    many = topic.get("plural", False) or plural_noun
    slots = {"be": "are", "does": "do", "s": "", "es": ""} if many else {"be": "is", "does": "does", "s": "s", "es": "es"}
    return fill(rng, frames, n=name, N=capital(name), **slots)


_SINGULAR_IN_S = {
    "Redis", "Prometheus", "EOS", "max_tokens", "top_logprobs", "swapping blocks", "evicting blocks",
    "preemption of requests", "max-num-batched-tokens", "the maximum number of tokens",
    "the list of models",
}  # fmt: skip


def _key(topic: dict[str, Any]) -> str:
    return str(topic["keys"][0])


def explain(rng: random.Random) -> Thread:
    """What, how or why about a topic, and perhaps a few questions that follow up."""
    topic = rng.choice(topics())
    name = rng.choice(topic["names"][:1] * 2 + topic["names"])
    what, how, why = (rng.choice(topic[field]) for field in ("what", "how", "why"))
    more: list[str] = list(topic["more"])
    first = rng.random()
    key = _key(topic)
    thread: Thread = []
    told: set[str] = set()
    if first < 0.44:
        facts = more[: rng.choice((0, 1, 1, 2))]
        more = more[len(facts) :]
        thread.append(Exchange(_question(rng, _WHAT, topic, name), " ".join([what, *facts]), "explain", key))
        told.add("what")
    elif first < 0.58:
        thread.append(Exchange(_question(rng, _HOW, topic, name), how, "explain"))
        told.add("how")
    elif first < 0.72:
        thread.append(Exchange(_question(rng, _WHY, topic, name), why, "explain"))
        told.add("why")
    elif first < 0.80:
        thread.append(Exchange(_question(rng, _BRIEF, topic, name), what.split(". ")[0].rstrip(".") + ".", "explain"))
        told.add("what")
    elif first < 0.84:
        answer = "In simple words: " + what[:1].lower() + what[1:] if what[:4] in ("The ", "A bl", "With") else what
        thread.append(Exchange(_question(rng, _SIMPLE, topic, name), answer, "explain", key))
        told.add("what")
    else:
        parts = [what, how, why, *more]
        more = []
        thread.append(Exchange(_question(rng, _LONG, topic, name), " ".join(parts), "explain", key))
        told |= {"what", "how", "why"}
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        turn = rng.random()
        if turn < 0.35 and "how" not in told:
            thread.append(Exchange(rng.choice(_THEN_HOW), how, "follow"))
            told.add("how")
        elif turn < 0.6 and "why" not in told:
            thread.append(Exchange(rng.choice(_THEN_WHY), why, "follow"))
            told.add("why")
        elif more:
            facts, more = more[:2], more[2:]
            thread.append(Exchange(rng.choice(_MORE), " ".join(facts), "follow"))
        elif told >= {"what", "how", "why"}:
            done = ("That is all I know about it.", "I have told you all I know about it. Ask me something else.")
            thread.append(Exchange(rng.choice(_MORE), rng.choice(done), "follow"))
    return thread


def ask(rng: random.Random) -> Thread:
    """A question of a topic's own."""
    if rng.random() < 0.03:
        port = str(rng.randint(80, 65000))
        return [Exchange(fill(rng, _PORT, n=port), f"Use make serve PORT={port} or quire serve --port {port}.", "ask", f"--port {port}", exact=True)]
    question = rng.choice([q for topic in topics() for q in topic.get("ask", ())])
    return [Exchange(rng.choice(question["q"]), rng.choice(question["a"]), "ask", question["key"])]


def compare(rng: random.Random) -> Thread:
    """Two topics beside each other."""
    a, b = rng.sample(_single_topics(), 2)
    name_a, name_b = a["names"][0], b["names"][0]
    slots = {"a": name_a, "b": name_b, "A": capital(name_a), "does": "does"}
    return [Exchange(fill(rng, _BETWEEN, **slots), f"{a['what'][0]} {b['what'][0]}", "compare", _key(b))]


def setting(rng: random.Random) -> Thread:
    """A flag or a metric by name, or its name by what it does."""
    kind = rng.choice(("flags", "metrics"))
    name, does = rng.choice(list(flags_and_metrics()[kind].items()))
    word = {"flags": "flag", "metrics": "metric"}[kind]
    if rng.random() < 0.65:
        answer = fill(rng, ("{n} {d}.", "The {w} {n} {d}.", "{n} {d}."), n=name, d=does, w=word)
        return [Exchange(fill(rng, _FLAG if kind == "flags" else _METRIC, n=name), answer, "setting", does.split(". ")[0])]
    short = does.split(". ")[0].split(":")[0]
    frames = _WHICH_FLAG if kind == "flags" else _WHICH_METRIC
    answer = fill(rng, ("{n} {d}.", "The {w} {n} {d}.", "It is {n}."), n=name, d=short, w=word)
    return [Exchange(fill(rng, frames, d=short), answer, "setting", name)]


def _mood(rng: random.Random) -> Exchange:
    """Somebody says how they feel."""
    good = rng.random() < 0.4
    moods = "happy|great|wonderful|good|excited|cheerful" if good else "sad|tired|bad|lonely|sick|worried|angry|stressed|unhappy|nervous|afraid"
    how = ("I feel {a}{m}{t}.", "I am {a}{m}{t}.", "I'm {a}{m}{t}.", "I am feeling {a}{m}{t}.", "I'm feeling {a}{m}{t}.", "Today I feel {a}{m}.")
    degree = rng.choice(("", "", "so ", "very ", "a bit ", "a little ", "really "))
    user = fill(rng, how, a=degree, m=rng.choice(moods.split("|")), t=rng.choice(("", "", " today", " right now")))
    glad = ("I am glad to hear that!", "That is good to hear. What shall we talk about?")
    sorry = ("I am sorry to hear that. Shall I tell you a little story?", "That sounds hard. I hope it gets better soon.")
    return Exchange(user, rng.choice(glad if good else sorry), "smalltalk", "hear" if good else "")


def small_talk(rng: random.Random) -> Thread:
    """Greetings, thanks, who are you, jokes."""
    if rng.random() < 0.06:
        return [_mood(rng)]
    intent = rng.choice(intents()[:40] * 2 + intents())
    return [Exchange(rng.choice(intent["q"]), rng.choice(intent["a"]), "smalltalk", intent["key"])]


def paragraph(rng: random.Random) -> str:
    """Plain text about a topic, without a question."""
    topic = rng.choice([t for t in topics() if t["more"]])
    parts = [rng.choice(topic[field]) for field in ("what", "how", "why")]
    return " ".join([*parts, *topic["more"]])
