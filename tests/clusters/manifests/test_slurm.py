"""The batch scripts of Slurm: what can be seen without a Slurm, and, slow, all of it on two nodes of this machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_files import CLUSTER, ROOT
from optional_programs import needs, program

from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import files, write
from scaleray.config import load_config

SCRIPTS = sorted(path for path in CLUSTER.rglob("*") if path.suffix in (".sh", ".sbatch"))
BATCH = sorted((CLUSTER / "slurm").glob("*.sbatch"))


@pytest.mark.combination
def test_shellcheck_finds_nothing_in_any_script():
    found = subprocess.run([program("shellcheck"), *map(str, SCRIPTS)], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_is_one_that_bash_can_read_and_stops_at_errors(path):
    assert subprocess.run(["bash", "-n", str(path)], timeout=30).returncode == 0
    text = path.read_text()
    if text.startswith("#!"):
        assert "set -euo pipefail" in text and os.access(path, os.X_OK)


UNTIL_KNOWN = 'until [ -s "$(dirname "$RAY_AUTH_TOKEN_PATH")/pid" ]; do sleep 0.1; done'
"""In a command: wait until the job has written down its number."""


def options(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", path.read_text(), re.M))


@pytest.mark.parametrize("path", BATCH, ids=lambda path: path.name)
def test_a_batch_script_asks_for_the_nodes_of_the_table_and_is_queued_again(path, tmp_path):
    asked = options(path)
    assert asked["nodes"] == "2" and asked["gpus-per-node"] == "h100:8" and asked["ntasks-per-node"] == "1"
    assert (
        {"requeue", "exclusive"} <= set(asked)
        and asked["signal"].startswith("B:USR1@")
        and asked["open-mode"] == "append"
    )
    assert "--resume auto" in path.read_text()
    write(tmp_path, files(ClusterSpec(gpus="4xl4", nodes=9), ["slurm"]))
    other = options(tmp_path / "slurm" / path.name)
    assert other["nodes"] == "9" and other["gpus-per-node"] == "l4:4"


def sourced(tmp_path: Path, body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What bash says after the common part was sourced, with a `srun` and a `ray` of ours before all others."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in {
        "scontrol": 'echo "JobId=41234 PreemptTime=${PREEMPTED:-None} x"',
        "srun": 'while case "$1" in -*) true ;; *) false ;; esac; do shift; done; exec "$@"',
        "ray": 'echo "ray $*" >>"$OUT"; [ "$1" != stop ] || { eval "${AT_STOP:-}"; exit 0; }; eval "${AT_START:-}"; while [ "$1" != -- ]; do shift; done; shift; [ -z "${DEAD:-}" ] || exit 0; exec "$@"',
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(tmp_path / "out"), "SLURM_JOB_ID": "41234", "SLURM_JOB_NUM_NODES": "2",
        "SCALERAY_CHECKPOINT__STORAGE_PATH": str(tmp_path), "INTERFACE": "", **environment,
    }  # fmt: skip
    script = f"set -euo pipefail\nsource {shlex.quote(str(CLUSTER / 'slurm' / 'ray_on_all_nodes.sh'))}\naddress_of_this_node() {{ echo 10.0.0.9; }}\n{body}"
    return subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=60)


def test_the_exit_code_of_the_command_is_that_of_the_job_and_nothing_stays(tmp_path):
    done = sourced(tmp_path, "run_on_all_nodes bash -c 'exit 7'")
    assert done.returncode == 7, done.stderr
    said = (tmp_path / "out").read_text()
    assert "symmetric-run --address 10.0.0.9:21234 --min-nodes 2" in said  # a port by the job's number
    assert said.startswith("ray stop --force\n")  # what a job before it left on the nodes, which are this one's alone
    assert list((tmp_path / ".slurm").iterdir()) == []
    assert sourced(tmp_path, "run_on_all_nodes true").returncode == 0


def test_a_ray_that_does_not_start_is_a_failure_though_symmetric_run_ends_with_0(tmp_path):
    done = sourced(tmp_path, "run_on_all_nodes true", DEAD="1")
    assert done.returncode == 1 and "Ray did not start on 10.0.0.9:21234" in done.stderr


@pytest.mark.always("2026-11-23T22:10:40-True")
@pytest.mark.parametrize(("preempted", "waits"), [("2026-11-23T22:10:40", True), ("None", False)])
def test_a_job_that_is_preempted_waits_to_be_queued_again_and_one_that_is_cancelled_ends(tmp_path, preempted, waits):
    body = f"run_on_all_nodes bash -c '{UNTIL_KNOWN}; kill -KILL $PPID; sleep 5'"
    done = sourced(tmp_path, body, PREEMPTED=preempted, PREEMPTED_WAIT_S="0.1")
    assert done.returncode == 137 and ("Slurm queues the job again" in done.stdout) is waits, done.stdout + done.stderr


def test_the_token_is_new_long_and_for_its_owner_alone(tmp_path):
    look = 'run_on_all_nodes bash -c \'stat -c %a "$RAY_AUTH_TOKEN_PATH"; cat "$RAY_AUTH_TOKEN_PATH"; echo; echo $RAY_AUTH_MODE\''
    first, second = (sourced(tmp_path, look).stdout.split() for _ in range(2))
    assert first[0] == "600" and re.fullmatch("[0-9a-f]{64}", first[1]) and first[2] == "token"
    assert first[1] != second[1] and first[1] not in (tmp_path / "out").read_text()


def test_asked_to_leave_the_command_alone_gets_sigterm(tmp_path):
    command = tmp_path / "command.sh"
    command.write_text(
        "trap 'echo asked; exit 1' TERM\n"
        + UNTIL_KNOWN
        + "\nkill -USR1 $SHELL_OF_THE_JOB\nfor i in $(seq 300); do sleep 0.1; done\n"
    )
    done = sourced(
        tmp_path,
        f'export SHELL_OF_THE_JOB=$$\nrun_on_all_nodes bash {shlex.quote(str(command))} || code=$?\necho "left $asked_to_leave code $code"',
    )
    assert "asked" in done.stdout and "left 1 code 1" in done.stdout, done.stdout + done.stderr


ENDED = "run_on_all_nodes bash -c '" + UNTIL_KNOWN + "; kill -TERM $SHELL_OF_THE_JOB'"


@pytest.mark.parametrize("body", [ENDED, "run_on_all_nodes true; exit 3", "run_on_all_nodes false"])
def test_the_token_goes_with_the_job_however_it_ends(tmp_path, body):
    done = sourced(tmp_path, f"export SHELL_OF_THE_JOB=$$\n{body}")
    assert done.returncode == {ENDED: -15}.get(body, done.returncode) != 0
    assert list((tmp_path / ".slurm").iterdir()) == []


def test_what_a_job_writes_is_as_readable_as_its_users_other_files_and_the_token_is_not(tmp_path):
    body = "umask 022\nrun_on_all_nodes bash -c 'umask; stat -c %a \"$SCALERAY_CHECKPOINT__STORAGE_PATH\"/.slurm/*'"
    assert sourced(tmp_path, body).stdout.split() == ["0022", "700"]


@pytest.mark.parametrize("moment", ["AT_STOP", "AT_START"])
def test_a_job_that_is_asked_to_leave_before_its_command_has_begun_leaves(tmp_path, moment):
    known = 'until [ -e "$(dirname "$RAY_AUTH_TOKEN_PATH")/leave" ]; do sleep 0.1; done'
    ask = "kill -USR1 $SHELL_OF_THE_JOB" + (f"; {known}" if moment == "AT_START" else "")
    body = 'export SHELL_OF_THE_JOB=$$\nrun_on_all_nodes sleep 300 || code=$?\necho "left $asked_to_leave code $code"'
    done = sourced(tmp_path, body, **{moment: ask})
    assert re.search("left 1 code (1|143)$", done.stdout.strip()), done.stdout + done.stderr


def test_saving_ends_before_slurm_ends_the_job(tmp_path):
    settings = CLUSTER / "slurm" / "settings.sh"
    told = subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(settings))}; echo $SCALERAY_CHECKPOINT__GRACE_S"],
        env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": "x", "SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    saving = load_config(
        ROOT / "jobs" / "digits.yaml", environ={"SCALERAY_CHECKPOINT__GRACE_S": told.stdout.strip()}
    ).checkpoint.grace_s
    for path in BATCH:
        assert 60 < saving < int(options(path)["signal"].removeprefix("B:USR1@"))


def swept(tmp_path: Path, line: str) -> subprocess.CompletedProcess[str]:
    """What the script of an array gives to the training of a line, a word on each line."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "settings.sh").write_text(f"export SCALERAY_CHECKPOINT__STORAGE_PATH='{tmp_path}'\n")
    stand_in = 'run_on_all_nodes() { printf \'%s\\n\' "$@"; echo "${SLURM_EXPORT_ENV-unset}"; }\n'
    (tmp_path / "scripts" / "ray_on_all_nodes.sh").write_text(stand_in)
    (tmp_path / "sweep.txt").write_text(f"--seed 1\n{line}\n")
    return subprocess.run(
        [str(CLUSTER / "slurm" / "sweep.sbatch"), "-c", "a.yaml"],
        env={
            "PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_SCRIPTS": str(tmp_path / "scripts"),
            "SLURM_ARRAY_TASK_ID": "2", "SLURM_ARRAY_JOB_ID": "7", "SLURM_EXPORT_ENV": "NONE",
        },
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip


def test_a_line_of_a_sweep_is_read_as_a_shell_would(tmp_path):
    line = """--stop.after "2 epochs" --workload.args '{rows: 10, name: "a b"}' --seed 3 --notes ''"""
    words = swept(tmp_path, line).stdout.split("\n")
    assert words[:6] == ["python", "-m", "scaleray", "train", "--resume", "auto"]
    assert words[6:14] == [
        "--stop.after",
        "2 epochs",
        "--workload.args",
        '{rows: 10, name: "a b"}',
        "--seed",
        "3",
        "--notes",
        "",
    ]
    assert words[14:] == ["-c", "a.yaml", "unset", ""]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "line 2 of sweep.txt is empty: --array=1-2"),
        ('--stop.after "2 epochs', "has a quote without its other one"),
    ],
)
def test_a_line_of_a_sweep_that_cannot_be_read_is_one_message(tmp_path, line, said):
    done = swept(tmp_path, line)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


@needs("slurmctld", "slurmd", "munged")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_scripts_run_on_a_slurm_of_two_nodes():
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = CLUSTER / "slurm" / "try_on_one_machine.sh"
    done = subprocess.run(
        [str(script)], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=1700
    )
    if done.returncode == 75:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0 and done.stdout.strip().endswith("all is well"), (
        done.stdout[-4000:] + done.stderr[-4000:]
    )
