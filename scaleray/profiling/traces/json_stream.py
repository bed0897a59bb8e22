"""Incremental reader of a large JSON object, one of whose arrays is passed on element by element without being stored.

Traces are objects with some small values and one array, `traceEvents`, which may hold millions of events. Other keys
may precede and follow it. `ijson` is not used: it takes 1.9 times the CPU time for a trace of torch.profiler, and
rejects control characters in names and NaN.
"""

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, BinaryIO

from scaleray.errors import TraceError

PIECE_BYTES = 1 << 20
MOST_OF_ONE_VALUE = 32 << 20
"""Characters beyond which a value is considered broken; an event has a few hundred."""
LONGEST_WORD = len("false")
AGAIN = "trace the run again, or copy the file again: scaleray profile -c FILE --trace"

_BETWEEN = re.compile(r"[\s,]*")
# Decimal: microseconds since 1970 with three decimals do not fit into a float
_DECODER = json.JSONDecoder(strict=False, parse_float=Decimal)


def read_object(file: BinaryIO, name: str, array: str, each: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the object in `file` without the array named `array`, whose elements are passed to `each` in turn.

    name: the file, for messages. Raises TraceError for a file that is truncated or not a JSON object.
    """
    text = _Text(file, name)
    if text.next() != "{":
        raise TraceError(name, "not a JSON object", "a trace begins with {", "give a file written by torch.profiler")
    text.skip(1)
    values: dict[str, Any] = {}
    while text.next() != "}":
        key = text.value()
        if text.next() != ":":
            raise text.broken("':' is missing after a key")
        text.skip(1)
        if key == array and text.next() == "[":
            text.skip(1)
            text.elements(each)
        else:
            values[key] = text.value()
    return values


class _Text:
    """Text of a file, decoded piece by piece, with a read position."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.text, self.at = "", 0
        self.is_whole = False
        self.num_elements = 0

    def next(self) -> str:
        """Return the next character that is neither whitespace nor a comma."""
        while True:
            self.at = _BETWEEN.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._more():
                raise self._cut_off()

    def skip(self, characters: int) -> None:
        self.at += characters

    def value(self) -> Any:
        """Return the JSON value that begins at the next character."""
        self.next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as exc:
                self._more_or_raise(exc)
                continue
            if end == len(self.text) and self._more():  # a number may continue
                continue
            self.at = end
            return value

    def elements(self, each: Callable[[dict[str, Any]], None]) -> None:
        """Pass all elements of an array to `each`, and consume its end."""
        decode, between = _DECODER.raw_decode, _BETWEEN.match
        while True:
            for element in self._decoded(decode, between):
                each(element)
            if self.next() == "]":
                self.skip(1)
                return
            each(self.value())
            self.num_elements += 1

    def _decoded(self, decode: Callable[..., Any], between: Callable[..., Any]) -> Iterator[dict[str, Any]]:
        """Yield the elements that were read completely."""
        text, at = self.text, self.at
        try:
            while True:
                at = between(text, at).end()
                element, at = decode(text, at)
                yield element
                self.at = at
                self.num_elements += 1
        except json.JSONDecodeError:  # end of the piece, or of the array
            return

    def _more(self) -> bool:
        """Read another piece of the file, if there is one."""
        if self.is_whole:
            return False
        try:
            piece = self.file.read(PIECE_BYTES)
        except (EOFError, zlib.error) as exc:  # gzip reports a truncated file in this way
            self.is_whole = True
            raise self._cut_off() from exc
        except OSError as exc:  # gzip's BadGzipFile
            raise TraceError.problem(self.name, f"cannot be read as JSON or gzip: {exc}", AGAIN) from exc
        self.is_whole = not piece
        self.text, self.at = self.text[self.at :] + self.decode(piece, final=self.is_whole), 0
        return not self.is_whole

    def _more_or_raise(self, exc: json.JSONDecodeError) -> None:
        if len(self.text) - self.at > MOST_OF_ONE_VALUE:
            raise self.broken(exc.msg) from exc
        left = len(self.text) - exc.pos
        if not self._more():
            is_cut = left <= LONGEST_WORD or "string" in exc.msg  # the decoder stopped at the end, or in an open string
            raise (self._cut_off() if is_cut else self.broken(exc.msg)) from exc

    def _cut_off(self) -> TraceError:
        return TraceError(
            self.name,
            f"cut off after event {self.num_elements}",
            "a complete trace ends with its closing brackets",
            AGAIN,
        )

    def broken(self, why: str) -> TraceError:
        """Return the error for a file that is not JSON."""
        return TraceError.problem(self.name, f"is not valid JSON after event {self.num_elements}: {why}", AGAIN)
