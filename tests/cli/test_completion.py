"""Shell completion: the scripts as the shells themselves run them."""

import subprocess

import pytest
from optional_programs import needs, program

from scaleray.cli.completion import with_config_keys
from scaleray.cli.main import app, run_command

CASES = [
    (["checkp"], "checkpoint"),
    (["checkpoint", "re"], "rebuild"),
    (["config", "sch"], "schema"),
    (["train", "--scale.wor"], "--scale.workers"),
    (["train", "--batch.gl"], "--batch.global-size"),
    (["profile", "--fsdp.pre"], "--fsdp.prefetch"),
    (["study", "--strategy.name", "pipe"], "pipeline"),
    (["plan", "--glob"], "--global-batch"),
    (["--inst"], "--install-completion"),
]
ASK = {
    "bash": 'source "$1"; shift; COMP_WORDS=(scaleray "$@"); COMP_CWORD=$#; _scaleray; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'source $argv[1]; complete -C "scaleray $argv[2..]" | string split -f1 \\t',
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The path of a shell's script, written once."""
    folder, copy = tmp_path_factory.mktemp("completion"), with_config_keys(app)

    def write(shell):
        path = folder / shell
        if not path.exists():
            path.write_text(copy.generate_completion(shell=shell))
        return path

    return write


@pytest.mark.always("words1-rebuild")
@pytest.mark.parametrize(("words", "whole"), CASES)
def test_bash_completes_commands_options_keys_and_their_values(script, words, whole):
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK["bash"], "bash", script("bash"), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [whole], done.stderr


@needs("fish")
@pytest.mark.parametrize(("words", "whole"), CASES)
def test_fish_completes_them_too(script, words, whole):
    done = subprocess.run(
        [program("fish"), "--no-config", "-c", ASK["fish"], script("fish"), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert whole in done.stdout.split(), done.stderr


@needs("zsh")
def test_zsh_takes_the_script(script):
    done = subprocess.run([program("zsh"), "-f", "-n", script("zsh")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.combination
def test_zshs_script_has_the_keys_of_the_config_with_their_values(script):
    text = script("zsh").read_text()
    assert text.startswith("#compdef scaleray")
    assert "--scale.workers[" in text and ":precision.dtype:(fp32 bf16 fp16 fp64)" in text.replace("--", "")


@pytest.mark.combination
def test_it_is_installed_where_the_shell_looks_and_elsewhere_if_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_command(["--install-completion", "--shell", "bash"]) == 0
    (path,) = (tmp_path / ".local").rglob("scaleray")
    assert str(path) in capsys.readouterr().out and str(path) in (tmp_path / ".bashrc").read_text()
    assert run_command(["--install-completion", "--shell", "fish", "--output", str(tmp_path / "own")]) == 0
    assert "complete -c scaleray" in (tmp_path / "own").read_text()


@pytest.mark.combination
def test_a_script_that_cannot_be_written_is_one_message(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run_command(["--install-completion", "--shell", "bash", "--output", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
