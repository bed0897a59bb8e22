"""Meaning of Slurm's words: states of jobs, reasons for which they wait, and why a submission was refused."""

from __future__ import annotations

import re
import time

from scaleray.launch.submit.job import JobNow

STATES = {
    "COMPLETED": "SUCCEEDED",
    "CANCELLED": "STOPPED",
    "FAILED": "FAILED",
    "TIMEOUT": "FAILED",
    "NODE_FAIL": "FAILED",
    "OUT_OF_MEMORY": "FAILED",
    "BOOT_FAIL": "FAILED",
    "DEADLINE": "FAILED",
    "RUNNING": "RUNNING",
    "COMPLETING": "RUNNING",
    "SUSPENDED": "RUNNING",
    "STAGE_OUT": "RUNNING",
}
"""Slurm's states in the words of Ray's; any other waits."""
NO_OUTPUT = "0:53"
"""Exit code of a job whose output file could not be opened on its first node."""
LIMITS = ("QOS", "Assoc", "MaxJobs", "MaxSubmit", "MaxNode", "MaxCpu", "MaxGRES", "MaxMem", "PartitionTimeLimit")
ORDINARY = ("", "None", "(null)", "NonZeroExitCode")
PROBLEMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("qos policy", "violates accounting", "qosmax", "assoc", "job submit limit", "grptres"),
        "a limit of your account or QOS is reached",
        "sacctmgr show qos and sshare show them; wait for jobs to end, or ask for less (`options` of the cluster)",
    ),
    (
        ("disk quota exceeded", "no space left"),
        "the shared folder has no room for you",
        "delete what is no longer needed there, or name another `folder`",
    ),
    (
        ("unable to contact slurm controller", "connection refused", "connect failure", "zero bytes were transmitted"),
        "its controller cannot be reached",
        "scontrol ping tells whether it is up",
    ),
    (("file exists",), "its folder has a job of this name", "give another --name"),
    (
        ("permission denied", "read-only file system", "cannot create directory"),
        "the shared folder cannot be written",
        "`folder` is one that all nodes see, and that is yours",
    ),
    (
        ("sbatch: command not found", "scontrol: command not found", "squeue: command not found", "sbatch: not found"),
        "Slurm's commands are not there",
        "name the login node in `ssh`, or load Slurm's module in your profile",
    ),
    (
        ("could not establish a configuration",),
        "no controller of Slurm is found from here",
        "submit from a login node, or name one in `ssh` of the cluster",
    ),
    (
        (
            "invalid partition",
            "invalid account",
            "invalid qos",
            "node configuration is not available",
            "more processors",
        ),
        "it has no such partition, account or nodes",
        "sinfo shows what there is; `options` of the cluster is where it is asked for",
    ),
)
"""Parts of the words of sbatch and of a shell, what they mean, and what to do."""
SSH_PROBLEMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("permission denied", "too many authentication"), "it does not let you in", "ssh-add -l; ssh-copy-id HOST"),
    (("host key verification",), "its key is not the one that is known", "ask who runs it before you accept another"),
    (("could not resolve",), "no machine has this name", "`ssh` of the cluster is what ssh takes, such as me@login"),
)


def problem_of(text: str) -> tuple[str, str]:
    """Meaning of an error, and its remedy."""
    low = text.lower()
    for signs, allowed, hint in PROBLEMS:
        if any(sign in low for sign in signs):
            return allowed, hint
    return "Slurm says", ""


def status_of(name: str, text: str, *, folder: str) -> JobNow:
    """A job from the words of scontrol, squeue or sacct, and from the files next to its log."""
    lines = text.splitlines()
    fields = _fields(lines[0] if lines else "")
    state = fields.get("JobState", "")
    status = STATES.get(state, "PENDING")
    has_ended = status in ("SUCCEEDED", "FAILED", "STOPPED")
    exit_code = fields.get("ExitCode", "")
    message = in_words(fields.get("Reason", "")) if not has_ended else ""
    if not state:
        status, message = "UNKNOWN", "Slurm has forgotten it; its log tells how it ended"
    elif status == "FAILED" and "silent" in lines and exit_code in (NO_OUTPUT, ""):
        message = f"a node could not write below {folder}: name a folder that all nodes see, as `folder` of the cluster"
    elif state not in ("COMPLETED", "FAILED", "CANCELLED") and has_ended:
        message = state.lower().replace("_", " ")
    if "stopped" in lines and status == "FAILED":
        status, message = "STOPPED", ""
    code = re.match(r"(\d+):", exit_code)
    return JobNow(
        name=name,
        status=status,
        message=message,
        started_at=_seconds(fields.get("StartTime")),
        ended_at=_seconds(fields.get("EndTime")) if has_ended else None,
        exit_code=int(code[1]) if code and has_ended else None,
    )


def in_words(reason: str) -> str:
    """Why a job waits; nothing for a reason that says nothing."""
    if reason in ORDINARY:
        return ""
    if any(part in reason for part in LIMITS):
        return f"{reason}: a limit of your account, QOS or partition; sacctmgr show qos shows them"
    meanings = {
        "Resources": "its nodes are taken",
        "Priority": "others are before it",
        "BeginTime": "it is queued again",
    }
    return f"{reason}: {meanings[reason]}" if reason in meanings else reason


def _fields(line: str) -> dict[str, str]:
    """A line of scontrol or squeue, `Key=value ...`, or one of sacct, with bars."""
    if "|" in line and "=" not in line.partition("|")[0]:
        names = ("JobId", "JobState", "ExitCode", "StartTime", "EndTime", "Reason")
        found = dict(zip(names, line.split("|"), strict=False))
    else:
        found = dict(re.findall(r"(\w+)=(\S*)", line))
    if "JobState" in found:
        found["JobState"] = found["JobState"].split()[0].rstrip("+") if found["JobState"] else ""
    return found


def _seconds(moment: str | None) -> float | None:
    try:
        return time.mktime(time.strptime(moment or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
