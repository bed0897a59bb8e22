"""Slurm jobs, unpacked into their own folders that all nodes see, and queued with sbatch, here or over ssh."""

import codecs
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from scaleray.clusters.submit.clusters import SlurmCluster
from scaleray.clusters.submit.package_versions import PROBE, Versions, versions_in
from scaleray.clusters.submit.programs import ProgramOutput, run
from scaleray.clusters.submit.submitted_job import JobNow, LostConnectionError, follow_by_polling
from scaleray.errors import ClusterError

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
"""Ray's job state for each of Slurm's; any other state means waiting."""
NO_OUTPUT = "0:53"
"""Exit code of a job whose output file could not be opened on its first node."""
LIMITS = ("QOS", "Assoc", "MaxJobs", "MaxSubmit", "MaxNode", "MaxCpu", "MaxGRES", "MaxMem", "PartitionTimeLimit")
ORDINARY = ("", "None", "(null)", "NonZeroExitCode")
PROBLEMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("qos policy", "violates accounting", "qosmax", "assoc", "job submit limit", "grptres"),
        "a limit of your account or QOS is reached",
        "sacctmgr show qos and sshare show them; wait for jobs to end, or request less (`options` of the cluster)",
    ),
    (
        ("disk quota exceeded", "no space left"),
        "you have no space left in the shared folder",
        "delete unneeded files there, or choose another `folder`",
    ),
    (
        ("unable to contact slurm controller", "connection refused", "connect failure", "zero bytes were transmitted"),
        "its controller cannot be reached",
        "scontrol ping shows whether it is up",
    ),
    (("file exists",), "its folder already contains a job of this name", "choose another --name"),
    (
        ("permission denied", "read-only file system", "cannot create directory"),
        "the shared folder cannot be written",
        "`folder` must be visible to all nodes and writable for you",
    ),
    (
        ("sbatch: command not found", "scontrol: command not found", "squeue: command not found", "sbatch: not found"),
        "Slurm's commands are not found",
        "give the login node in `ssh`, or load Slurm's module in your profile",
    ),
    (
        ("could not establish a configuration",),
        "no Slurm controller can be found from here",
        "submit from a login node, or give one in `ssh` of the cluster",
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
        "sinfo lists them; set yours in the cluster's `options`",
    ),
)
"""Parts of messages of sbatch and shells, with their meaning and the remedy."""
SSH_PROBLEMS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("permission denied", "too many authentication"), "it refused your login", "ssh-add -l; ssh-copy-id HOST"),
    (
        ("host key verification",),
        "its host key differs from the known one",
        "ask its administrator before accepting it",
    ),
    (("could not resolve",), "no machine has this name", "`ssh` must be an ssh destination, such as me@login"),
)


def problem_of(text: str) -> tuple[str, str]:
    """Return the meaning of an error and its remedy."""
    low = text.lower()
    for signs, allowed, hint in PROBLEMS:
        if any(sign in low for sign in signs):
            return allowed, hint
    return "Slurm reports", ""


def status_of(name: str, text: str, *, folder: str) -> JobNow:
    """Parse a job's state from the output of scontrol, squeue or sacct, and from the files next to its log."""
    lines = text.splitlines()
    fields = _fields(lines[0] if lines else "")
    state = fields.get("JobState", "")
    status = STATES.get(state, "PENDING")
    has_ended = status in ("SUCCEEDED", "FAILED", "STOPPED")
    exit_code = fields.get("ExitCode", "")
    message = to_text(fields.get("Reason", "")) if not has_ended else ""
    if not state:
        status, message = "UNKNOWN", "Slurm no longer lists it; its log shows how it ended"
    elif status == "FAILED" and "silent" in lines and exit_code in (NO_OUTPUT, ""):
        message = f"a node could not write below {folder}: set the cluster's `folder` to one that all nodes see"
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


def to_text(reason: str) -> str:
    """Reason why a job waits; empty if it is uninformative."""
    if reason in ORDINARY:
        return ""
    if any(part in reason for part in LIMITS):
        return f"{reason}: a limit of your account, QOS or partition; sacctmgr show qos shows them"
    meanings = {
        "Resources": "its nodes are in use",
        "Priority": "other jobs are ahead of it",
        "BeginTime": "it is queued again",
    }
    return f"{reason}: {meanings[reason]}" if reason in meanings else reason


def _fields(line: str) -> dict[str, str]:
    """Fields of a line of scontrol or squeue, `Key=value ...`, or of sacct, separated by bars."""
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


SCRIPT = "cluster/slurm/train.sbatch"
PASSED_ON = (
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "PYTHONPATH",
    "SHELL",
    "SLURM_CONF",
    "USER",
    "VIRTUAL_ENV",
)
"""Environment variables of the submitting user that a job gets besides Slurm's own; no others are passed on."""
ACCOUNTING = "sacct --noheader --allocations --parsable2 --format=JobID,State,ExitCode,Start,End,Reason"
FIELDS = "JobId=%i JobState=%T Reason=%r StartTime=%S EndTime=%e"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")


class SlurmJobs:
    """Jobs submitted to one Slurm cluster by `scaleray submit`. Every method raises ClusterError."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.place = cluster.name
        self._read_bytes: dict[str, int] = {}
        """Number of bytes of each log that `follow` has written."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def versions(self) -> Versions | None:
        """Versions in the cluster's environment, queried on the host of sbatch; None if no environment is set."""
        if self.cluster.environment is None:
            return None
        python = f"{self.cluster.environment.rstrip('/')}/bin/python"
        said = self._shell(f"{shlex.quote(python)} -c {shlex.quote(PROBE)}")
        found = versions_in(said.out)
        if found is None:
            raise ClusterError.problem(
                f"the environment of {self.cluster.name}",
                f"has a Python that does not report versions: {said.problem}",
                "use a virtual environment visible to the nodes; docs/cluster.md explains how to create one",
            )
        return found

    def submit(
        self, name: str, package: bytes, *, words: Sequence[str], command: str, secrets: Mapping[str, str]
    ) -> str:
        """Unpack the code into its own folder, and queue the batch script there; return the job's number. words:
        arguments of the script. command: of scaleray, with arguments."""
        folder = self._path(name)
        python = f"{self.cluster.environment.rstrip('/')}/bin/python" if self.cluster.environment else "python3"
        unpacked = self._shell(
            f"umask 077; test ! -e {folder} || {{ echo 'File exists' >&2; exit 1; }}\n"
            f"mkdir -p {folder} && cd {folder} && cat >{folder}.zip "
            f"&& {shlex.quote(python)} -m zipfile -e {folder}.zip . && rm {folder}.zip "
            f"|| {{ code=$?; cd /; rm -rf {folder} {folder}.zip; exit $code; }}",
            given=package,
        )
        if unpacked.code:
            self._refuse(unpacked)
        said = self._shell("bash -s", given=self._queueing(name, words, command, secrets).encode())
        found = re.search(r"^scaleray-job (\d+)", said.out, re.M)
        if said.code or found is None:
            self._shell(f"rm -rf {folder}")
            self._refuse(said)
        return found[1]

    def _queueing(self, name: str, words: Sequence[str], command: str, secrets: Mapping[str, str]) -> str:
        """Shell script that queues a job. It is sent through a pipe, so that its values are not in the process list."""
        folder, cluster = self._path(name), self.cluster
        names = [*PASSED_ON, *secrets]
        storage = f"{cluster.folder.rstrip('/')}/runs"
        lines = ["set -eu", "umask 077", f"cd {folder}"]
        given = {"SCALERAY_CHECKPOINT__STORAGE_PATH": storage, **secrets, "SUBCOMMAND": command}
        lines += [f"export {key}={shlex.quote(value)}" for key, value in given.items()]
        if cluster.environment:
            path = shlex.quote(cluster.environment.rstrip("/"))
            lines += [f"export VIRTUAL_ENV={path}", f'export PATH={path}/bin:"$PATH"']
        names += ["SCALERAY_CHECKPOINT__STORAGE_PATH", "SUBCOMMAND"]
        options = [
            *cluster.options,
            "--parsable",
            f"--job-name={name}",
            "--comment=scaleray",
            "--open-mode=append",
            f"--output={cluster.folder.rstrip('/')}/{name}.out",
            f"--export={','.join(dict.fromkeys(names))}",
        ]
        queued = shlex.join(["sbatch", *options, SCRIPT, *words])
        lines += [f"job=$({queued})", f'echo "${{job%%;*}}" >{folder}.id', 'echo "scaleray-job ${job%%;*}"']
        return "\n".join(lines) + "\n"

    def job(self, name: str) -> JobNow:
        """State of a job in Slurm, by its name or number, from the controller or, once it has ended, from the
        accounting.
        """
        name, number = self._found(name)
        said = self._shell(
            f'if said=$(scontrol show job {number} --oneliner 2>&1); then echo "$said"\n'
            'else case "$said" in *"Invalid job id"*) ;; *) echo "$said" >&2; exit 1 ;; esac\n'
            f"said=$({ACCOUNTING} --jobs={number} 2>/dev/null)\n"
            'echo "${said:-unknown}"; fi\n'
            f"test ! -e {self._path(name)}.stop || echo stopped\ntest -s {self._path(name)}.out || echo silent",
            must=True,
        )
        return status_of(name, said.out, folder=self.cluster.folder)

    def list(self) -> list[JobNow]:
        """All submitted jobs, newest first."""
        folder = self._path("")
        said = self._shell(
            f"cd {folder} 2>/dev/null || exit 0\n"
            'for file in *.id; do test -e "$file" || continue; name=${file%.id}\n'
            'echo "id $(cat "$file") $name $(test -e "$name.stop" && echo stopped)"; done\n'
            f"squeue --me --noheader --states=all --format={shlex.quote(FIELDS)}\n"
            f"{ACCOUNTING} --starttime=now-30days 2>/dev/null || true",
            must=True,
        )
        lines = said.out.splitlines()
        ids = [line.split() for line in lines if line.startswith("id ")]
        # an empty number, which could not be written to a full folder, is skipped
        ids = [words for words in ids if len(words) > 2 and words[1].isdigit()]
        found = []
        for _, number, name, *rest in sorted(ids, key=lambda words: -int(words[1])):
            mine = [line for line in lines if line.startswith((f"JobId={number} ", f"{number}|"))][:1] or ["unknown"]
            found.append(status_of(name, "\n".join([*mine, *rest]), folder=self.cluster.folder))
        return found

    def logs(self, name: str) -> str:
        """Output of a job so far."""
        name, _ = self._found(name)
        return self._shell(f"cat {self._path(name)}.out 2>/dev/null || true", must=True).out

    def stop(self, name: str) -> None:
        """Stop a job. A running training saves first; a second call ends it immediately."""
        name, number = self._found(name)
        folder = self._path(name)
        said = self._shell(
            f'if [ "$(squeue --noheader --jobs={number} --format=%T)" = RUNNING ] && [ ! -e {folder}.stop ]; then\n'
            f"  touch {folder}.stop && scancel --signal=USR1 --batch {number}\n"
            f"else touch {folder}.stop && scancel {number}; fi"
        )
        if said.code:
            self._refuse(said)

    def follow(self, name: str, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Write a job's output until it ends; lost connections are retried."""
        return follow_by_polling(self.cluster.name, lambda: self.job(name), lambda: self._write_new(name, write), say)

    def _write_new(self, name: str, write: Callable[[str], None]) -> None:
        name, _ = self._found(name)
        begin = self._read_bytes.get(name, 0)
        said = self._shell(f"tail -c +{begin + 1} {self._path(name)}.out 2>/dev/null || true", must=True)
        new = said.raw
        if new:
            self._read_bytes[name] = begin + len(new)
            write(self._decoder.decode(new))

    def _found(self, name: str) -> tuple[str, str]:
        """Name and number of a job, given one of the two."""
        folder = self._path("")
        if name.isdigit():
            look = f"cd {folder} 2>/dev/null && grep -lx {name} -- *.id | head -n 1 || true"
            given = self._shell(look, must=True).out.strip()
            found = (given.removesuffix(".id"), name) if given else None
        else:
            given = self._shell(f"cat {self._path(name)}.id 2>/dev/null || true", must=True).out.strip()
            found = (name, given) if given.isdigit() else None
        if found is None:
            hint = f"scaleray jobs list --to {self.cluster.name}"
            raise ClusterError.problem(
                "JOB", f"{name} is neither the name nor the number of a job in {self.cluster.folder}", hint
            )
        return found

    def _path(self, name: str) -> str:
        """A job's folder, quoted for a shell; without a name, the folder of all jobs."""
        folder = self.cluster.folder.rstrip("/") or "/"
        return shlex.quote(f"{folder}/{name}" if name else folder)

    def _shell(self, script: str, *, given: bytes = b"", must: bool = False) -> ProgramOutput:
        """Run a script on the host of sbatch. must: whether to raise an error if the script fails."""
        words = ["bash", "-c", script]
        if self.cluster.ssh:
            words = [*SSH, self.cluster.ssh, f"bash -lc {shlex.quote(script)}"]
        said = run(words, given=given, limit_s=300.0 if given else 60.0)
        if said.code == 124 and not self.cluster.ssh:
            raise LostConnectionError(
                "--to", self.cluster.name, f"Slurm does not answer: {said.problem}", "scontrol ping"
            )
        if self.cluster.ssh and said.code in (255, 124):
            for signs, allowed, hint in SSH_PROBLEMS:
                if any(sign in said.problem.lower() for sign in signs):
                    raise ClusterError("ssh", self.cluster.ssh, f"{allowed}: {said.problem}", hint)
            raise LostConnectionError(
                "ssh", self.cluster.ssh, f"it cannot be reached: {said.problem}", f"try: ssh {self.cluster.ssh}"
            )
        if must and said.code:
            self._refuse(said)
        return said

    def _refuse(self, said: ProgramOutput) -> NoReturn:
        allowed, hint = problem_of(said.problem)
        if "cannot be reached" in allowed:
            raise LostConnectionError("--to", self.cluster.name, f"{allowed}: {said.problem}", hint)
        raise ClusterError("--to", self.cluster.name, f"{allowed}: {said.problem}", hint)
