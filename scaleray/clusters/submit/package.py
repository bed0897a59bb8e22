"""Pack the working directory of a job into one file, up to a size limit. Files that git or a `.rayignore` ignores,
files named like secrets, and files that no job needs are excluded. Equal contents give an equal file, which is uploaded
to a cluster only once."""

import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from scaleray.common.git_state import SENT, state_to_send
from scaleray.errors import ConfigError
from scaleray.records.text.units import disk_space

IGNORE_FILES = (".gitignore", ".rayignore")
NEVER = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__",
    ".venv",
    "venv",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)
SECRETS = (
    *(".env*", "*.env", ".netrc", ".npmrc", ".git-credentials", "*credentials*.json", ".pypirc", ".pgpass"),
    *(".ssh", ".aws", ".gnupg", ".kube", ".docker"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
)
"""Names that are never uploaded, regardless of ignore files."""
NO_CHECKOUT, GIT_S = "not a git repository", 60.0
MOST_FILES = 100_000
FIRST_MOMENT = (1980, 1, 1, 0, 0, 0)
"""Earliest time that a zip file can hold, used for all files so that equal contents give an equal package."""


@dataclass(frozen=True)
class Contents:
    """Contents of a package. files: paths relative to `folder` with their sizes in bytes. left_out: number of excluded
    files and folders. linked: links to folders, excluded files or places outside the folder, which are excluded too."""

    folder: Path
    files: dict[str, int]
    left_out: int = 0
    linked: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Total bytes of all files, uncompressed."""
        return sum(self.files.values())

    def largest(self, count: int = 5) -> list[tuple[str, int]]:
        """Largest top-level folders and files, with their bytes."""
        sizes: Counter[str] = Counter()
        for name, num_bytes in self.files.items():
            top, slash, _ = name.partition("/")
            sizes[top + slash] += num_bytes
        return sizes.most_common(count)

    def to_text(self) -> str:
        """Summary of the contents, in one line."""
        largest = ", ".join(f"{name} {disk_space(num_bytes)}" for name, num_bytes in self.largest())
        left_out = (
            f"; {self.left_out} excluded by git or {' and '.join(IGNORE_FILES)}, as secrets, or because no job needs "
            f"them"
            if self.left_out
            else ""
        )
        named = ", ".join([*self.linked[:5], *(["..."] if len(self.linked) > 5 else [])])
        linked = f"; not uploaded, as they link to folders, excluded files or outside: {named}" if self.linked else ""
        return f"{len(self.files)} files, {disk_space(self.num_bytes)} ({largest}){left_out}{linked}"


def contents_of(folder: Path, *, max_mib: float) -> Contents:
    """Return the contents of a folder to upload. Raises ConfigError if they are too large, before reading any file."""
    if not folder.is_dir():
        raise ConfigError.problem("--working-dir", f"{folder} is not a folder", "give the folder of your code")
    top, found, links, left_out = folder.resolve(), dict[Path, int](), list[Path](), 0
    for path, is_in in _walk(top):
        if not is_in:
            left_out += 1
        elif path.is_symlink():
            links.append(path)
        else:
            found[path] = path.stat().st_size
        if len(found) + len(links) > MOST_FILES:
            raise ConfigError.problem("--working-dir", f"{folder} has more than {MOST_FILES:,} files", _advice([]))
    targets = {path: target for path in links if (target := path.resolve()) in found}
    found |= {path: found[target] for path, target in targets.items()}
    contents = Contents(
        top,
        {path.relative_to(top).as_posix(): size for path, size in found.items()},
        left_out,
        tuple(path.relative_to(top).as_posix() for path in links if path not in targets),
    )
    if (total := contents.num_bytes) > max_mib * 2**20:
        raise ConfigError.problem(
            "--working-dir",
            f"{folder} has {disk_space(total)} to upload, more than --max-mib {max_mib:g}",
            _advice(contents.largest()),
        )
    return contents


def check_is_in(contents: Contents, path: Path, *, what: str) -> str:
    """Return the name of a file in the folder. Raises ConfigError if it is outside or excluded."""
    inside = path.resolve()
    if not inside.is_relative_to(contents.folder):
        raise ConfigError.problem(
            what,
            f"{path} is outside the working directory {contents.folder}, which alone is uploaded",
            "put it there, or give a folder that contains both with --working-dir",
        )
    name = inside.relative_to(contents.folder).as_posix()
    if name not in contents.files and _is_secret(*Path(name).parts):
        raise ConfigError.problem(what, f"{path} is named like a secret, and secrets are never uploaded", "rename it")
    if name not in contents.files:
        if not inside.exists():
            raise ConfigError.problem(what, f"{path} does not exist")
        raise ConfigError.problem(
            what,
            f"{path} is excluded by git or one of {', '.join(IGNORE_FILES)}",
            "include it with a line `!NAME` in .rayignore",
        )
    return name


def pack(contents: Contents, target: Path, also: Mapping[str, str] | None = None) -> None:
    """Write the contents to a zip file, with their commit. also: texts of additional files by name."""
    sent = state_to_send(contents.folder, contents.files)
    also = {**({SENT: sent} if sent else {}), **(also or {})}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name in sorted(contents.files.keys() - also.keys()):
            path = contents.folder / name
            about = zipfile.ZipInfo(name, FIRST_MOMENT)
            about.compress_type = zipfile.ZIP_DEFLATED
            about.external_attr = (path.stat().st_mode & 0o777) << 16
            file.writestr(about, path.read_bytes())
        for name, text in sorted(also.items()):
            about = zipfile.ZipInfo(name, FIRST_MOMENT)
            about.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(about, text)


def _walk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield every file, and whether it is uploaded; for an excluded or linked folder, only the folder itself."""
    from pathspec import GitIgnoreSpec

    by_git = _ignored_by_git(folder)
    ignore_files = IGNORE_FILES if by_git is None else IGNORE_FILES[1:]
    ignored = by_git or set[Path]()
    specs: list[tuple[Path, GitIgnoreSpec]] = []
    for root, folders, names in os.walk(folder):
        here = Path(root)
        if here != folder and ".git" in (*folders, *names):
            ignored |= _ignored_by_git(here) or set()
        specs = [(base, spec) for base, spec in specs if here.is_relative_to(base)]
        for ignore in ignore_files:
            if ignore in names:
                lines = (here / ignore).read_text(errors="replace").splitlines()
                specs.append((here, GitIgnoreSpec.from_lines(lines)))
        for name in sorted(folders):
            if _stays(name) or _is_ignored(here / name, specs, ignored, is_folder=True):
                folders.remove(name)
                yield here / name, False
            elif (here / name).is_symlink():  # it may lead anywhere, even to a parent folder
                folders.remove(name)
                yield here / name, True
        folders.sort()
        for name in sorted(names):
            path = here / name
            if path.is_file():  # neither sockets nor broken links
                yield path, not _stays(name) and not _is_ignored(path, specs, ignored, is_folder=False)


def _stays(name: str) -> bool:
    return name in NEVER or _is_secret(name)


def _is_secret(*names: str) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for name in names for pattern in SECRETS)


def _ignored_by_git(folder: Path) -> set[Path] | None:
    """Files and whole subfolders that git ignores; None outside a checkout. Raises ConfigError if git fails."""
    listed = ["ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory"]
    command, environment = ["git", "-C", str(folder), *listed], {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=GIT_S)
        problem = "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError) as exc:
        problem = str(exc) if any((one / ".git").exists() for one in (folder, *folder.parents)) else NO_CHECKOUT
    if NO_CHECKOUT in problem:
        return None
    if problem:
        raise ConfigError.problem("git", f"cannot list its ignored files in {folder}: {problem}")
    return {folder / os.fsdecode(name) for name in done.stdout.split(b"\0") if name}


def _is_ignored(path: Path, specs: list, by_git: set[Path], *, is_folder: bool) -> bool:
    """Whether git, or the last matching rule of the ignore files above it, excludes a path."""
    ignored = path in by_git
    for base, spec in specs:
        name = path.relative_to(base).as_posix() + ("/" if is_folder else "")
        if (said := spec.check_file(name).include) is not None:
            ignored = said
    return ignored


def _advice(largest: list[tuple[str, int]]) -> str:
    named = ", ".join(f"{name} {disk_space(num_bytes)}" for name, num_bytes in largest)
    largest_first = f"largest: {named}\n  " if named else ""
    return f"{largest_first}exclude files in .rayignore, and keep data in a bucket or on a shared file system"
