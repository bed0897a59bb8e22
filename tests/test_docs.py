"""The words of README and docs: workloads run as written, commands and options exist, files and links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from optional_programs import program

from jobs.packaging.wheel import after
from scaleray.cli.main import run_command
from scaleray.config.checkpoint import MemorySettings
from scaleray.config.loading import known_keys

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- docs-test: (\S+) -->\n```(\w*)\n(.*?)```", re.S)
LARGEST_README = 200


def blocks(page: str, name: str) -> list[str]:
    """The marked blocks of a page, in order; of a difference the new text."""
    return [
        (after(text, "+") if kind == "diff" else text).strip()
        for found, kind, text in BLOCK.findall((ROOT / page).read_text())
        if found == name
    ]


@pytest.fixture
def folder(tmp_path, mlflow_database, monkeypatch):
    """The test's folder as the current one, with runs and database in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCALERAY_TRACKING__URI", f"sqlite:///{mlflow_database}")
    monkeypatch.setenv("SCALERAY_CHECKPOINT__STORAGE_PATH", str(tmp_path / "runs"))
    return tmp_path


def write(folder: Path, page: str, *names: str) -> None:
    for name in names:
        (folder / name).write_text(blocks(page, name)[0])


def run(line: str, *more: str) -> int:
    program, *words = shlex.split(line)
    assert program == "scaleray"
    return run_command([*words, *more])


def test_the_readme_can_be_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LARGEST_README


def test_bringing_a_workload_takes_under_40_lines():
    text = "\n".join(blocks("README.md", "iris.py") + blocks("README.md", "iris.yaml"))
    assert len([line for line in text.splitlines() if line.strip()]) < 40


def test_the_readmes_plain_script_runs_and_gains_at_most_20_lines():
    (text,) = [text for name, _, text in BLOCK.findall((ROOT / "README.md").read_text()) if name == "iris.py"]
    exec(compile(after(text, "-"), "plain.py", "exec"), {})
    assert sum(line.startswith("+") for line in text.splitlines()) <= 20


def test_the_readmes_workload_trains_as_written(folder, capsys):
    write(folder, "README.md", "iris.py", "iris.yaml")
    [command] = blocks("README.md", "command")
    # without Ray here; whole runs on two workers are tested in tests/launch
    assert run(command, "--local", "--scale.workers", "1") == 0
    assert "target reached: val/accuracy >= 0.95" in capsys.readouterr().out


def commands_of_the_tutorial(*kinds: str) -> list[str]:
    """The commands of marked blocks, in the order of the page."""
    found = BLOCK.findall((ROOT / "docs/tutorial.md").read_text())
    return [line for kind, _, text in found if kind in kinds for line in text.strip().splitlines()]


def test_the_tutorials_commands_run_as_written(folder, capsys):
    write(folder, "docs/tutorial.md", "my_digits.py", "my_digits.yaml")
    for command in commands_of_the_tutorial("command"):
        assert run(command) == 0, command
    assert "test/accuracy" in capsys.readouterr().out


def test_the_tutorials_plain_script_runs(folder, capsys):
    [script] = blocks("docs/tutorial.md", "plain.py")
    exec(compile(script, "plain.py", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_commands_of_the_tutorial_run_in_its_order(folder):
    write(folder, "docs/tutorial.md", "my_digits.py", "my_digits.yaml")
    (folder / "jobs").symlink_to(ROOT / "jobs")
    for command in commands_of_the_tutorial("command", "on-ray", "slow"):  # each in a process, as a reader has it
        subprocess.run([sys.executable, "-m", *shlex.split(command)], check=True, timeout=600)


def commands() -> set[tuple[str, str]]:
    """Every command of scaleray's on every page, with the page: in blocks of their own, and between backticks."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        fenced = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S))
        written = re.findall(r"^(?:.* -m )?(scaleray .+)$", fenced, re.M) + re.findall(r"`(scaleray [^`]+)`", text)
        found |= {(page.name, line.partition("   #")[0].replace("\n", " ")) for line in written}
    return found


@pytest.mark.parametrize(("page", "line"), sorted(commands()))
def test_a_command_exists_with_its_options(page, line, capsys):
    known = {*known_keys(), *(f"checkpoint.memory.{name}" for name in MemorySettings.model_fields)}
    words = [word.strip("[]`,();") for word in line.split()[1:]]
    nouns = []
    for word in words:
        if not re.fullmatch(r"[a-z]+", word) or len(nouns) == 2:
            break
        nouns.append(word)
    while nouns and run_command([*nouns, "--help"]) != 0:
        nouns.pop()  # the argument of a command, or the rest of a sentence
    assert nouns or "--help" in words or "--install-completion" in words, line
    capsys.readouterr()
    run_command([*nouns, "--help"])
    options = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    for word in words:
        name = re.match(r"--([A-Za-z_.-]+)", word)
        if name is None:
            continue
        key = name[1].replace("-", "_")
        negative = f"--{name[1].removeprefix('no-')}"
        assert f"--{name[1]}" in options or negative in options or key in known or key == "section.key", (word, line)


def test_the_clusters_that_the_page_names_can_be_read(tmp_path, monkeypatch):
    from scaleray.clusters.submit.clusters import cluster_of

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "scaleray").mkdir()
    [text] = blocks("docs/cluster.md", "clusters.yaml")
    (tmp_path / "scaleray" / "clusters.yaml").write_text(text)
    assert [type(cluster_of(name)).__name__ for name in ("mine", "lab", "hpc")] == [
        "RayCluster",
        "KubernetesCluster",
        "SlurmCluster",
    ]


FOREIGN = re.findall(r"`((?:kubectl|sbatch|ray|docker|sky) [^`]+)`", (ROOT / "docs" / "cluster.md").read_text())


def test_the_cluster_page_has_commands_of_every_system():
    assert {line.split()[0] for line in FOREIGN} == {"kubectl", "sbatch", "ray", "docker", "sky"}


@pytest.mark.parametrize("line", sorted({*FOREIGN}))
def test_files_that_commands_of_other_programs_name_are_there(line):
    for name in re.findall(r"(?<![\w/])((?:cluster|jobs)/[\w/.-]+)", line):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("line", sorted({line for line in FOREIGN if line.startswith("kubectl ")}))
def test_kubectl_knows_the_commands_and_options_of_the_page(line):
    words = shlex.split(line.partition(" | ")[0])[1:]
    while words[:1] == ["-n"]:
        words = words[2:]
    verb = words[:2] if words[0] == "create" else words[:1]
    told = subprocess.run([program("kubectl"), *verb, "--help"], capture_output=True, text=True, timeout=60)
    told_of_all = subprocess.run([program("kubectl"), "options"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0 and "Usage:" in told.stdout, line
    for option in (word.partition("=")[0] for word in words if word.startswith("-")):
        assert re.search(rf"(^|\s){option}(,|=|\s)", told.stdout + told_of_all.stdout), (line, option)


def test_ray_knows_the_commands_and_options_of_the_page():
    from ray.scripts.scripts import cli

    for line in (line for line in FOREIGN if line.startswith("ray ")):
        found, words = cli, shlex.split(line.partition(" -- ")[0])[1:]
        while words and hasattr(found, "commands") and words[0] in found.commands:
            found = found.commands[words.pop(0)]
        assert found is not cli, line
        known = {name for option in found.params for name in option.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known or not known, line


def test_every_file_named_on_a_page_exists():
    for page in PAGES:
        for name in re.findall(r"`((?:scaleray|jobs|tests|docs|cluster)/[\w/.-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)


def test_every_link_between_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_every_page_is_reached_from_the_readme():
    texts = "\n".join(page.read_text() for page in PAGES)
    for page in PAGES[1:]:
        assert f"({page.name})" in texts or f"(docs/{page.name})" in texts, page.name


def test_config_keys_between_backticks_exist():
    known = set(known_keys())
    sections = {key.partition(".")[0] for key in known}
    for page in PAGES:
        for key in re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", page.read_text()):
            section, _, name = key.partition(".")
            if section in sections and name not in ("py", "csv", "json", "jsonl", "yaml", "md", "pt"):
                assert key in known, (page.name, key)


def test_generated_pages_are_what_the_code_says():
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        assert (ROOT / "docs" / name).read_text() == page(), f"{name} is out of date: make docs"
