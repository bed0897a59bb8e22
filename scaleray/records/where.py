"""Conditions on the fields of a record in words: parsed, never executed.

    efficiency < 0.8
    gpus >= 4 and (owner == anna or owner == "Ben B.")
    rule in [linear, sqrt] and not cost is missing
    val/accuracy >= 0.97

Comparisons are < <= > >= == and !=; a value is a number, a word or a quoted text. What is not known is neither true nor
false, as in SQL: neither `cost < 5` nor `not cost < 5` holds for a record without a cost.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LONGEST = 2000
DEEPEST = 50
"""Largest number of characters of a condition, and largest depth of its brackets."""
TOKEN = re.compile(
    r"""\s*(?:(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w./:-]))"""
    r"""|(?P<quoted>"[^"]*"|'[^']*')|(?P<sign><=|>=|==|!=|<|>|=|[()\[\],])|(?P<word>[\w./:@%+-]+))"""
)
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
EQUAL = {"=": True, "==": True, "!=": False}
WORDS = {"true": True, "false": False}
HINT = "a condition reads like: efficiency < 0.8 and model == digits"

Holds = Callable[[Mapping[str, Any]], bool | None]


@dataclass(frozen=True)
class Condition:
    """A parsed condition. fields: those that it asks for, each once."""

    text: str
    fields: tuple[str, ...]
    _holds: Holds

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises ValueError, which says what is wrong and where, for anything that is no condition."""
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters, and at most {LONGEST} are read")
        parser = _Parser(text)
        holds = parser.either(0)
        if parser.kind:
            raise ValueError(f"{parser.shown} is not expected after what comes before it")
        return cls(text, tuple(dict.fromkeys(parser.fields)), holds)

    def holds(self, values: Mapping[str, Any]) -> bool | None:
        """Whether it is true of these values by field; None where that is not known.

        Raises ValueError for a word that is to be above or below a number.
        """
        return self._holds(values)


class _Parser:
    """Recursive descent over the tokens; one method for each level of binding."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0
        self.fields: list[str] = []
        self.kind, self.word = "", ""
        self._next()

    @property
    def shown(self) -> str:
        return f"'{self.word}'" if self.kind else "the end"

    def _next(self) -> tuple[str, str]:
        """The present token, and step on to the next one."""
        now = (self.kind, self.word)
        rest = self._text[self._place :]
        match = TOKEN.match(rest)
        if match is None:
            if rest.strip():
                raise ValueError(f"{rest.strip()[:20]!r} cannot be read")
            self.kind, self.word = "", ""
            return now
        self._place += match.end()
        self.kind, self.word = str(match.lastgroup), match[str(match.lastgroup)]
        return now

    def _takes(self, *words: str) -> bool:
        if self.kind in ("word", "sign") and self.word in words:
            self._next()
            return True
        return False

    def _wants(self, sign: str) -> None:
        if not self._takes(sign):
            raise ValueError(f"'{sign}' is expected instead of {self.shown}")

    def either(self, depth: int) -> Holds:
        found = self.both(depth)
        while self._takes("or"):
            found = _either(found, self.both(depth))
        return found

    def both(self, depth: int) -> Holds:
        found = self.one(depth)
        while self._takes("and"):
            found = _both(found, self.one(depth))
        return found

    def one(self, depth: int) -> Holds:
        if depth > DEEPEST:
            raise ValueError(f"its brackets are nested more than {DEEPEST} deep")
        if self._takes("not"):
            inner = self.one(depth + 1)
            return lambda values: None if (found := inner(values)) is None else not found
        if self._takes("("):
            whole = self.either(depth + 1)
            self._wants(")")
            return whole
        return self.comparison()

    def comparison(self) -> Holds:
        if self.kind != "word":
            raise ValueError(f"a field is expected instead of {self.shown}")
        _, name = self._next()
        self.fields.append(name)
        if self._takes("is"):
            return self.known(name)
        if self._takes("in"):
            self._wants("[")
            allowed = [self.value()]
            while self._takes(","):
                allowed.append(self.value())
            self._wants("]")
            return lambda values: None if (v := values.get(name)) is None else any(_equal(v, one) for one in allowed)
        kind, sign = self._next()
        if kind != "sign" or sign not in {*ORDERS, *EQUAL}:
            raise ValueError(f"a comparison such as < or == is expected after {name} instead of {sign or 'the end'!r}")
        wanted = self.value()
        if sign in EQUAL:
            is_wanted = EQUAL[sign]
            return lambda values: None if (v := values.get(name)) is None else _equal(v, wanted) == is_wanted
        return lambda values: None if (v := values.get(name)) is None else _ordered(name, v, sign, wanted)

    def known(self, name: str) -> Holds:
        is_not = self._takes("not")
        kind, word = self._next()
        if kind != "word" or word not in ("known", "missing"):
            raise ValueError(f"after '{name} is' comes known or missing, not {word or 'the end'!r}")
        return lambda values: (values.get(name) is not None) == ((word == "known") != is_not)

    def value(self) -> Any:
        kind, word = self._next()
        if kind == "number":
            number = float(word)
            if not math.isfinite(number):
                raise ValueError(f"{word} is too large a number")
            return number
        if kind == "quoted":
            return word[1:-1]
        if kind == "word":
            return WORDS.get(word, word)
        raise ValueError(f"a value is expected instead of {word or 'the end'!r}")


def _both(left: Holds, right: Holds) -> Holds:
    def holds(values: Mapping[str, Any]) -> bool | None:
        found = (left(values), right(values))
        return False if False in found else None if None in found else True

    return holds


def _either(left: Holds, right: Holds) -> Holds:
    def holds(values: Mapping[str, Any]) -> bool | None:
        found = (left(values), right(values))
        return True if True in found else None if None in found else False

    return holds


def _equal(value: Any, wanted: Any) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted or str(value).lower() == str(wanted).lower()
    if isinstance(wanted, float):
        return _number(value) == wanted
    return str(value) == wanted


def _ordered(name: str, value: Any, sign: str, wanted: Any) -> bool:
    if isinstance(wanted, float):
        number = _number(value)
        if number is None:
            raise ValueError(f"{name} is {value!r}, which {sign} cannot compare with a number")
        return ORDERS[sign](number, wanted)
    if isinstance(value, str) and isinstance(wanted, str):  # dates
        return ORDERS[sign](value, wanted)
    raise ValueError(f"{name} is {value!r}, which {sign} cannot compare with {wanted!r}")


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
