"""`scaleray sweep` on the command line: bad usage is one message and exit code 2, before Ray or torch are started."""

import subprocess
import sys
from pathlib import Path

import pytest

from scaleray.cli.main import run_command

ROOT = Path(__file__).parents[2]
DIGITS = ["sweep", "-c", str(ROOT / "jobs" / "digits.yaml")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sweep"], "Give a config with -c FILE"),
        ([*DIGITS, "--batch-sizes", "2048..32"], "--batch-sizes is '2048..32'"),
        ([*DIGITS, "--batch-sizes", "32..x"], "such as 32..2048 for all doublings"),
        ([*DIGITS, "--rules", "linear,cubic"], "--rules is cubic"),
        ([*DIGITS, "--learning-rates", "fast"], "--learning-rates is fast"),
        ([*DIGITS, "--vary", "optimizer.weight_decay"], "it must be a key and its values"),
        ([*DIGITS, "--search", "grid", "--learning-rates", "1e-4..1e-2"], "has no grid"),
        ([*DIGITS, "--search", "optuna"], "--trials is required"),
        ([*DIGITS, "--trials", "0"], "--trials is 0"),
        ([*DIGITS, "--scheduler", "genetic"], "--scheduler"),
        ([*DIGITS, "--batch-size", "32"], "batch_size"),
        ([*DIGITS, "--batch-sizes", "32", "--workers-per-trial", "12"], "nearest: 24 or 36"),
        ([*DIGITS, "--guided"], "fastest way to a target"),
        ([*DIGITS, "--vary", "optimizer.wait_decay=0,1"], "optimizer.weight_decay"),
        ([*DIGITS, "--scheduler", "pbt", "--batch-sizes", "32,64"], "may differ only in learning rate"),
        ([*DIGITS, "--continue", "somewhere"], "--continue uses the options of the interrupted sweep"),
        (["sweep", "--continue", "/nowhere/at/all"], "/nowhere/at/all"),
        (
            ["sweep", "--continue", "nothing://bucket/sweep"],
            "--continue nothing://bucket/sweep/sweep.json cannot be read",
        ),
        ([*DIGITS, "--against-grid", "/nowhere"], "--against-grid is '/nowhere': only a guided sweep"),
        ([*DIGITS, "--guided", "--against-grid", "nothing://b/grid"], "--against-grid nothing://b/grid has no record"),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_2(words, message, capsys):
    assert run_command(words) == 2
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text


def test_a_slip_in_the_options_is_said_without_torch_ray_or_mlflow():
    code = (
        "import sys; from scaleray.cli.main import run_command; "
        f"code = run_command({[*DIGITS, '--rules', 'cubic']!r}); "
        "print(code, [m for m in ('torch', 'ray', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "2 []", done.stderr
