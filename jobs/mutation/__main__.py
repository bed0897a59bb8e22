"""Do the tests notice when the code is wrong? Mutants of scaleray, each judged by the fast tests that run its line.

    python -m jobs.mutation record                    which test runs which line (once for a state of the code; minutes)
    python -m jobs.mutation run --number 120 --seed 0 draw mutants and judge them; goes on where it was interrupted
    python -m jobs.mutation planted                   the named mutants of jobs/mutation/planted.json
    python -m jobs.mutation page                      write the page of the results again, such as after equivalent.json grew

All of it happens in copies of the working tree (--work), as it was recorded; the tree itself is never changed. One line of JSON
a mutant goes to WORK/results.jsonl, the page to --page. Survivors need a test, or an entry with the reason in
jobs/mutation/equivalent.json; `record --tests FILE` takes new tests into the map, and `run` judges survivors again.
Exit code 1 when less than --least of the mutants were killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jobs.mutation import results
from jobs.mutation.choice import ROOMS, candidates, draw
from jobs.mutation.coverage_map import CoverageMap, KnownTest, record
from jobs.mutation.judge import Judge, copy_of
from jobs.mutation.mutants import Mutant

TREE = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).parent / "planted.json"
MAP = "coverage_map.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when enough mutants were killed."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "run", "planted", "page"))
    parser.add_argument("--number", type=int, default=120, help="mutants to draw")
    parser.add_argument("--most", type=int, default=10**6, help="mutants to judge in this call; the next one goes on")
    parser.add_argument("--seed", type=int, default=0, help="decides which")
    parser.add_argument("--rooms", default=",".join(ROOMS), help=f"comma between them: {', '.join(ROOMS)}")
    parser.add_argument(
        "--work", type=Path, default=TREE / "build" / "mutation", help="folder of the copy, the map and the results"
    )
    parser.add_argument("--page", type=Path, help="Markdown file for the results; default WORK/results.md")
    parser.add_argument("--tests", default="", help="record: only these test files, with commas")
    parser.add_argument(
        "--tests-of-each",
        type=int,
        default=10**6,
        help="tests that may judge a mutant, the nearest of those of its line",
    )
    parser.add_argument("--least", type=float, default=0.98, help="share that must be killed")
    options = parser.parse_args(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    recorded = work / "recorded"
    if options.command == "record":
        names = [name for name in options.tests.split(",") if name]
        before = CoverageMap.read(work / MAP) if names and (work / MAP).exists() else None
        if before is not None and (changed := _changed(recorded)):
            parser.error(f"{changed} is not what was recorded: record everything again, without --tests")
        found = record(copy_of(TREE, recorded), tests=names)
        found = before.with_more(found) if before is not None else found
        found.write(work / MAP)
        print(
            f"{len(found.tests)} tests run {sum(map(len, found.lines.values()))} lines of {len(found.lines)} files: {work / MAP}"
        )
        return 0
    rows_file = work / ("planted.jsonl" if options.command == "planted" else "results.jsonl")
    if options.command != "page":
        if not (work / MAP).exists():
            parser.error(f"there is no {work / MAP}: python -m jobs.mutation record")
        known = CoverageMap.read(work / MAP)
        if options.command == "run":
            rooms = [room.strip() for room in options.rooms.split(",")]
            if unknown := [room for room in rooms if room not in ROOMS]:
                parser.error(f"unknown rooms {unknown}; there are: {', '.join(ROOMS)}")
            mutants = draw(candidates(recorded, known, rooms), options.number, seed=options.seed, tree=recorded)
        else:
            mutants = planted(recorded)
        judge_all(mutants, known, work, rows_file, most=options.most, tests_of_each=options.tests_of_each)
    rows = _latest(rows_file)
    about = [
        f"{len(rows)} mutants, seed {options.seed}, commit {_commit()}, {time.strftime('%Y-%m-%d')}; tests: fast ones without Ray."
    ]
    page = options.page or rows_file.with_suffix(".md")
    page.write_text(results.page(rows, title="Mutation pass", about=about))
    print(f"{results.share_killed(rows):.1%} of {len(rows)} killed: {page}")
    return 0 if results.share_killed(rows) >= options.least else 1


def planted(tree: Path = TREE) -> list[Mutant]:
    """The named mutants, where their text is. Raises ValueError for one whose text is gone or not unique."""
    found = []
    for one in json.loads(PLANTED.read_text()):
        source = (tree / one["file"]).read_text()
        if source.count(one["before"]) != 1:
            raise ValueError(
                f"{one['name']}: {one['before']!r} stands {source.count(one['before'])} times in {one['file']}"
            )
        ahead = source[: source.index(one["before"])]
        column = len(ahead.rpartition("\n")[2].encode())
        found.append(Mutant(one["file"], ahead.count("\n") + 1, column, "", one["name"], one["before"], one["after"]))
    return found


def judge_all(
    mutants: Sequence[Mutant], known: CoverageMap, work: Path, rows_file: Path, *, most: int, tests_of_each: int
) -> None:
    """Judge at most so many of those that have no row yet, and survivors whose tests are others now."""
    tree = copy_of(work / "recorded", work / "judged")
    judge, reasons = Judge(tree), results.equivalent_ones()
    have = {_key(row): row for row in _latest(rows_file)}
    started = time.monotonic()
    for number, mutant in enumerate(mutants, start=1):
        before = have.get(mutant.key)
        if before is not None and before["verdict"] in ("killed", "timed out", "equivalent"):
            continue
        lines = mutant.before.count("\n")
        tests = known.tests_of(mutant.file, mutant.line, mutant.line + lines)[:tests_of_each]
        if before is not None and before["names"] == digest(tests):
            continue
        if most <= 0:
            break
        most -= 1
        outcome = judge.judge(mutant.file, mutant.applied((tree / mutant.file).read_text()), tests)
        row = results.row_of(mutant, outcome, reasons) | {"names": digest(tests)}
        results.append(rows_file, row)
        name = f"{mutant.file}:{mutant.line}"
        print(
            f"[{number}/{len(mutants)}, {time.monotonic() - started:.0f} s] {row['verdict']:<10} {name:<45} {mutant.operator}: "
            f"{' '.join(mutant.before.split())[:40]} -> {mutant.after[:40]}  ({outcome.seconds:.0f} s, {outcome.num_tests} tests) {outcome.by}",
            flush=True,
        )


def digest(tests: Sequence[KnownTest]) -> str:
    """Of their names: a survivor needs no second look by the same tests."""
    return hashlib.sha256("\n".join(sorted(test.name for test in tests)).encode()).hexdigest()[:12]


def _changed(recorded: Path) -> str:
    """The first source file that is another one now, or ""."""
    files = {path.relative_to(tree) for tree in (TREE, recorded) for path in (tree / "scaleray").rglob("*.py")}
    for file in sorted(files):
        one, other = TREE / file, recorded / file
        if not (one.exists() and other.exists() and one.read_bytes() == other.read_bytes()):
            return str(file)
    return ""


def _latest(path: Path) -> list[dict]:
    """The newest row of each mutant; arguments in favour of equivalence count from the moment they are written."""
    reasons = results.equivalent_ones()
    rows = list({_key(row): row for row in results.read(path)}.values())
    for row in rows:
        if row["verdict"] == "survived" and (reason := reasons.get(_key(row), "")):
            row |= {"verdict": "equivalent", "reason": reason}
    return rows


def _key(row: dict) -> tuple[str, ...]:
    return tuple(row[name] for name in ("file", "function", "operator", "before", "after"))


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=TREE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
