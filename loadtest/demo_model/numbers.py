"""Counting and arithmetic with small numbers, the alphabet, days and months."""

from __future__ import annotations

import random

from quire.loadtest.demo_model.exchange import Exchange, Thread, capital, fill, say

_SAY = say("numbers")

ONES = _SAY["ones"]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = _SAY["month_names"]
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_OPERATORS = {
    "+": (" + ", " plus ", "+", " and "),
    "-": (" - ", " minus ", "-"),
    "*": (" times ", " * ", " x ", " × ", "*", " multiplied by "),
    "/": (" divided by ", " / ", "/", " ÷ "),
}
_SIGN = {"+": "+", "-": "-", "*": "×", "/": "÷"}


def _written(n: int, spelled: bool) -> str:
    return ONES[n] if spelled and n <= 20 else str(n)


def arithmetic(rng: random.Random) -> Thread:
    """Ask for sums and differences up to 100, mostly up to 20, the times table, and its divisions."""
    sign = rng.choice("+++--***/")
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if sign in "+-" and rng.random() < 0.45:
        a, b = rng.randint(0, 100), rng.randint(0, 100)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    elif sign in "*/":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        if sign == "/":
            b = max(b, 1)
            a *= b
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[sign]
    words = rng.random() < 0.15 and max(a, b) <= 20
    operator = rng.choice(_OPERATORS[sign])
    if words and operator.strip() in {"+", "-", "*", "/", "x", "×", "÷"}:
        operator = {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "}[sign]
    question = fill(rng, _SAY["ask"], x=_written(a, words) + operator + _written(b, words))
    if sign == "-" and rng.random() < 0.1:
        question = f"Subtract {b} from {a}."
    elif sign == "+" and rng.random() < 0.1:
        question = f"Add {a} and {b}."
    elif sign == "*" and rng.random() < 0.1:
        question = f"Multiply {a} by {b}."
    answer = fill(
        rng,
        ("{e} = {r}.", "{e} = {r}.", "That is {r}: {e} = {r}."),
        e=f"{a} {_SIGN[sign]} {b}",
        r=str(result),
    )
    return [Exchange(question, answer, "arithmetic", f"= {result}.", exact=True)]


def counting(rng: random.Random) -> Thread:
    """Count from one number to another, up or down, in steps of 1, 2, 5 or 10."""
    step = rng.choice((1, 1, 1, 1, 2, 5, 10))
    start = rng.choice((1, 1, 1, 0, rng.randint(1, 80))) if step == 1 else step
    length = rng.choice((3, 4, 5, 5, 6, 8, 10, 10, 10, 12, 15, 20, 20, 25, 30))
    if step > 1:
        length = min(length, 12)
    numbers = [start + step * i for i in range(length)]
    if step == 1 and rng.random() < 0.03:
        numbers = list(range(1, 101))
    first, last = str(numbers[0]), str(numbers[-1])
    by = {1: "", 2: " by twos", 5: " by fives", 10: " by tens"}[step]
    if step == 1 and rng.random() < 0.3:
        numbers.reverse()
        frames = _SAY["count_down"]
        if first == "1":
            frames += _SAY["count_down_to_one"]
    else:
        frames = _SAY["count_from"]
        if numbers[0] == step:
            frames += _SAY["count"]
    listed = ", ".join(map(str, numbers))
    if numbers[-1] <= 20 and numbers[0] <= 20 and rng.random() < 0.2:
        first, last = ONES[int(first)], ONES[int(last)]
    answer = fill(rng, ("{n}.", "{n}.", "Here we go: {n}."), n=listed)
    return [Exchange(fill(rng, frames, a=first, b=last, by=by), answer, "counting", listed, exact=True)]


def number_facts(rng: random.Random) -> Thread:
    """Ask for neighbours, parity, the larger one, doubles and halves, words for numbers."""
    n, m = rng.randint(0, 100), rng.randint(0, 100)
    kind = rng.randrange(7)
    if kind == 0:
        question = fill(rng, _SAY["after"], n=str(n))
        return [Exchange(question, f"After {n} comes {n + 1}.", "numbers", f"comes {n + 1}.", exact=True)]
    if kind == 1:
        n = max(n, 1)
        question = fill(rng, ("What comes before {n}?", "Which number comes before {n}?"), n=str(n))
        return [Exchange(question, f"Before {n} comes {n - 1}.", "numbers", f"comes {n - 1}.", exact=True)]
    if kind == 2:
        parity = "odd" if n % 2 else "even"
        question = fill(rng, _SAY["parity"], n=str(n))
        return [Exchange(question, f"{n} is {parity}.", "numbers", parity, exact=True)]
    if kind == 3:
        m = m + 1 if m == n else m
        larger = rng.random() < 0.6
        best, other = (max(n, m), min(n, m)) if larger else (min(n, m), max(n, m))
        word = "larger" if larger else "smaller"
        question = fill(rng, _SAY[word], n=str(n), m=str(m))
        return [Exchange(question, f"{best} is {word} than {other}.", "numbers", f"{best} is", exact=True)]
    if kind == 4:
        n = rng.randint(1, 50)
        question = fill(rng, _SAY["double"], n=str(n))
        return [Exchange(question, f"Twice {n} is {2 * n}.", "numbers", f"is {2 * n}.", exact=True)]
    if kind == 5:
        n = rng.randint(1, 50)
        question = fill(rng, ("What is half of {n}?", "Halve {n}.", "What is the half of {n}?"), n=str(2 * n))
        return [Exchange(question, f"Half of {2 * n} is {n}.", "numbers", f"is {n}.", exact=True)]
    n = rng.randint(0, 20)
    question = fill(rng, _SAY["in_words"], n=str(n))
    return [Exchange(question, f"{n} is written {ONES[n]}.", "numbers", ONES[n], exact=True)]


def _neighbour(rng: random.Random, names: tuple[str, ...], kind: str) -> Thread:
    i = rng.randrange(len(names))
    step = rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    other = names[(i + step) % len(names)]
    question = fill(rng, _SAY["neighbour"], k=kind, w=word, n=names[i])
    return [Exchange(question, f"{other} comes {word} {names[i]}.", "calendar", f"{other} comes")]


def calendar(rng: random.Random) -> Thread:
    """Ask for days and months in order, with their lengths."""
    kind = rng.randrange(7)
    if kind <= 1:
        return _neighbour(rng, DAYS, "day")
    if kind <= 3:
        return _neighbour(rng, MONTHS, "month")
    if kind == 4:
        i = rng.randrange(12)
        month, days = MONTHS[i], MONTH_DAYS[i]
        tail = ", and 29 in a leap year" if i == 1 else ""
        question = fill(rng, _SAY["days_of_month"], n=month)
        return [Exchange(question, f"{month} has {days} days{tail}.", "calendar", str(days))]
    if kind == 5:
        i = rng.randrange(12)
        nth = _SAY["ordinals"][i]
        question = fill(rng, _SAY["nth_month"], o=nth)
        return [Exchange(question, f"The {nth} month is {MONTHS[i]}.", "calendar", MONTHS[i])]
    facts = (
        (_SAY["weekdays"], ", ".join(DAYS) + ".", "Sunday"),
        (_SAY["months"], ", ".join(MONTHS) + ".", "December"),
        (("How many days are in a week?", "How many days does a week have?"), "A week has 7 days.", "7"),
        (
            ("How many months are in a year?", "How many months does a year have?"),
            "A year has 12 months.",
            "12",
        ),
        (("How many hours are in a day?", "How many hours does a day have?"), "A day has 24 hours.", "24"),
        (
            ("How many minutes are in an hour?", "How many minutes does an hour have?"),
            "An hour has 60 minutes.",
            "60",
        ),
        (_SAY["seconds"], "A minute has 60 seconds.", "60"),
        (
            ("How many days are in a year?", "How many days does a year have?"),
            "A year has 365 days, and a leap year 366.",
            "365",
        ),
        (
            ("How many weeks are in a year?", "How many weeks does a year have?"),
            "A year has 52 weeks and a day or two.",
            "52",
        ),
        (("What are the seasons?", "Name the four seasons."), "Spring, summer, autumn and winter.", "autumn"),
    )
    questions, answer, key = rng.choice(facts)
    return [Exchange(rng.choice(questions), answer, "calendar", key)]


def alphabet(rng: random.Random) -> Thread:
    """Ask for the alphabet and neighbours in it."""
    kind = rng.randrange(4)
    if kind == 0:
        return [Exchange(rng.choice(_SAY["alphabet"]), " ".join(LETTERS), "alphabet", "X Y Z")]
    i = rng.randrange(25)
    if kind in (1, 2):
        where, given, other = "after", LETTERS[i], LETTERS[i + 1]
        if kind == 2:
            where, given, other = "before", other, given
        question = fill(rng, _SAY[f"letter_{where}"], x=given)
        answer = f"{capital(where)} {given} comes {other}."
        return [Exchange(question, answer, "alphabet", f"comes {other}", exact=True)]
    facts = (
        (_SAY["letters"], "The alphabet has 26 letters.", "26"),
        (
            ("What are the vowels?", "Name the vowels.", "List the vowels."),
            "The vowels are A, E, I, O and U.",
            "E, I, O",
        ),
        (("What is the first letter of the alphabet?",), "The first letter of the alphabet is A.", "is A"),
        (("What is the last letter of the alphabet?",), "The last letter of the alphabet is Z.", "is Z"),
    )
    questions, answer, key = rng.choice(facts)
    return [Exchange(rng.choice(questions), answer, "alphabet", key)]
