"""Which mutants are judged: drawn with a seed from lines that fast tests run, many files and functions rather than many of one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jobs.mutation.coverage_map import CoverageMap
from jobs.mutation.mutants import Mutant, compiles, mutants_of

ROOMS = ("training", "strategies", "data", "checkpoints", "tracking", "launch")
MOST_OF_A_FUNCTION = 2


def candidates(tree: Path, known: CoverageMap, rooms: Sequence[str]) -> dict[str, list[Mutant]]:
    """By file, the mutants of covered lines."""
    found = {}
    for room in rooms:
        for path in sorted((tree / "scaleray" / room).rglob("*.py")):
            file = str(path.relative_to(tree))
            lines = known.lines.get(file, {})
            mutants = [mutant for mutant in mutants_of(file, path.read_text()) if mutant.line in lines]
            if mutants:
                found[file] = mutants
    return found


def draw(by_file: dict[str, list[Mutant]], number: int, *, seed: int, tree: Path) -> list[Mutant]:
    """`number` mutants: a file by how much of it there is, an operator with equal chances, then one of its places."""
    chance = random.Random(seed)
    files = sorted(by_file)
    weights = [len(by_file[file]) for file in files]
    sources = {file: (tree / file).read_text() for file in files}
    chosen: list[Mutant] = []
    of_function: Counter[tuple[str, str]] = Counter()
    for _ in range(100 * number):
        if len(chosen) == number:
            break
        file = chance.choices(files, weights)[0]
        operator = chance.choice(sorted({mutant.operator for mutant in by_file[file]}))
        mutant = chance.choice([mutant for mutant in by_file[file] if mutant.operator == operator])
        place = (file, mutant.function)
        is_new = mutant not in chosen and of_function[place] < MOST_OF_A_FUNCTION
        if is_new and compiles(mutant.applied(sources[file])):
            chosen.append(mutant)
            of_function[place] += 1
    return chosen
