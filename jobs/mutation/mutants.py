"""Mutants of a source file: small changes that a test ought to notice, each an edit of the text.

Operators: comparisons and arithmetic turned, `and` and `or` exchanged, `not` taken away, conditions turned, numbers one more or
one less, true and false exchanged, statements with an effect left out, an empty return, two arguments or a rank's names
exchanged, an argument left out, min and max, all and any, floor and ceil exchanged, break and continue. Nothing is changed in
text, types, messages of errors, or outside functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "+"),
    ast.Pow: ("**", "*"),
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}
ATTRIBUTES = {
    "floor": "ceil", "ceil": "floor", "rank": "local_rank", "data_rank": "rank", "world_size": "data_parallel_size", "data_parallel_size": "world_size",
    "argmin": "argmax", "argmax": "argmin",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One edit. before, after: the text in `file` from (line, column) on; function: qualified name of the one around it."""

    file: str
    line: int
    column: int
    function: str
    operator: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What it is wherever its line has moved."""
        return self.file, self.function, self.operator, self.before, self.after

    def applied(self, source: str) -> str:
        """The mutated text. Raises ValueError where the source is another."""
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: self.line - 1])) + len(_prefix(lines[self.line - 1], self.column))
        if source[start : start + len(self.before)] != self.before:
            raise ValueError(f"{self.file}:{self.line} is not what it was")
        return source[:start] + self.after + source[start + len(self.before) :]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All of them, in the order of the text; a few do not compile, see `compiles`."""
    found = _Finder(file, source).walk(ast.parse(source))
    return sorted(set(found), key=lambda m: (m.line, m.column, m.operator, m.after))


def compiles(source: str) -> bool:
    """Whether it is Python at all, such as after an argument was left out."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.lines = file, source, source.splitlines(keepends=True)

    def walk(self, node: ast.AST, function: str = "") -> Iterator[Mutant]:
        """Mutants of a node and all below it, where it lies in a function."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{function}.{node.name}" if function else node.name
            inside = name if isinstance(node, ast.ClassDef) else f"{name}()"
            for child in node.body:
                yield from self.walk(child, inside)
            return
        if isinstance(node, (ast.JoinedStr, ast.Raise)):
            return
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from self.walk(node.value, function)
            return
        if "()" in function:
            for operator, place, before, after in self._changes(node):
                if before is not None and after != before:
                    yield Mutant(self.file, place[0], place[1], function, operator, before, after)
        for child in ast.iter_child_nodes(node):
            yield from self.walk(child, function)

    def _changes(self, node: ast.AST) -> Iterator[tuple[str, tuple[int, int], str | None, str]]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                before, after = COMPARISONS[type(operator)]
                yield self._between("comparison", left, right, before, after)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                before, after = ARITHMETIC[type(operator)]
                yield self._between("arithmetic", left, right, before, after)
            case ast.BoolOp(op=operator, values=[left, right, *_]):
                words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield self._between("and, or", left, right, *words)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "not", *self._whole(node), self._text(operand) or ""
            case ast.If(test=test) | ast.IfExp(test=test):
                yield "condition", *self._whole(test), f"not ({self._text(test)})"
            case ast.Constant(value=bool() as value):
                yield "constant", *self._whole(node), str(not value)
            case ast.Constant(value=int() as value):
                yield "constant", *self._whole(node), str(value + 1)
                if value > 1:
                    yield "constant", *self._whole(node), str(value - 1)
            case ast.Constant(value=float() as value):
                yield "constant", *self._whole(node), repr(value * 2 if value else 1.0)
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
                yield "statement", *self._whole(node), "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield "statement", *self._whole(node), "pass"
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield "return", *self._whole(value), "None"
            case ast.Name(id=name) if name in NAMES:
                yield "name", *self._whole(node), NAMES[name]
            case ast.Attribute(attr=name, value=value, ctx=ast.Load()) if name in ATTRIBUTES:
                yield "name", *self._whole(node), f"{self._text(value)}.{ATTRIBUTES[name]}"
            case ast.Break():
                yield "jump", *self._whole(node), "continue"
            case ast.Continue():
                yield "jump", *self._whole(node), "break"
        if isinstance(node, ast.Call):
            yield from self._calls(node)

    def _calls(self, node: ast.Call) -> Iterator[tuple[str, tuple[int, int], str | None, str]]:
        plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
        if len(plain) == len(node.args) >= 2:
            first, second = node.args[:2]
            one, two, whole = self._text(first), self._text(second), self._span(first, second)
            if one and two and whole:
                between = whole[len(one.encode()) : len(whole.encode()) - len(two.encode())]
                yield "arguments", (first.lineno, first.col_offset), whole, f"{two}{between}{one}"
        for keyword in node.keywords:
            if keyword.arg is not None and (text := self._text(keyword)) is not None:
                rest = self._after(keyword)
                yield "argument", (keyword.lineno, keyword.col_offset), text + rest, ""

    def _whole(self, node: ast.AST) -> tuple[tuple[int, int], str | None]:
        return (node.lineno, node.col_offset), self._text(node)  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str | None:
        return ast.get_source_segment(self.source, node)

    def _between(
        self, operator: str, left: ast.expr, right: ast.expr, before: str, after: str
    ) -> tuple[str, tuple[int, int], str | None, str]:
        """The operator's own text between two operands, which may be in brackets."""
        start, end = (left.end_lineno or 0, left.end_col_offset or 0), (right.lineno, right.col_offset)
        text = self._range(start, end)
        at = text.find(before)  # beside it there are only spaces, brackets and ends of lines
        if at < 0 or "#" in text:
            return operator, start, None, ""
        ahead = text[:at]
        lines = ahead.count("\n")
        column = len(ahead.rpartition("\n")[2].encode()) + (0 if lines else start[1])
        return operator, (start[0] + lines, column), before, after

    def _span(self, first: ast.expr, last: ast.expr) -> str | None:
        text = self._range((first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0))
        return None if "#" in text else text

    def _after(self, keyword: ast.keyword) -> str:
        """The comma behind an argument, if there is one."""
        line = self.lines[(keyword.end_lineno or 1) - 1].encode()[keyword.end_col_offset or 0 :].decode()
        return line[: len(line) - len(line.lstrip(", "))]

    def _range(self, start: tuple[int, int], end: tuple[int, int]) -> str:
        first, last = start[0] - 1, end[0] - 1
        if first == last:
            return self.lines[first].encode()[start[1] : end[1]].decode()
        ahead, behind = self.lines[first].encode()[start[1] :].decode(), self.lines[last].encode()[: end[1]].decode()
        return ahead + "".join(self.lines[first + 1 : last]) + behind


def _prefix(line: str, column: int) -> str:
    """ast counts columns in bytes."""
    return line.encode()[:column].decode()
