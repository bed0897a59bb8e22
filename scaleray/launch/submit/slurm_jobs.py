"""Jobs of a Slurm: packed into a folder of their own that all nodes see, and handed to sbatch, here or over ssh."""

from __future__ import annotations

import codecs
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from scaleray.errors import ClusterError
from scaleray.launch.submit.clusters import SlurmCluster
from scaleray.launch.submit.job import JobNow, LostConnectionError, follow_by_looking
from scaleray.launch.submit.programs import Said, run
from scaleray.launch.submit.slurm_words import SSH_PROBLEMS, problem_of, status_of
from scaleray.launch.submit.versions import PROBE, Versions, versions_in

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
"""Variables of the submitting user that a job gets in addition to Slurm's own; any other stays here."""
ACCOUNTING = "sacct --noheader --allocations --parsable2 --format=JobID,State,ExitCode,Start,End,Reason"
FIELDS = "JobId=%i JobState=%T Reason=%r StartTime=%S EndTime=%e"
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")


class SlurmJobs:
    """Jobs that `scaleray submit` gave to one Slurm. Every method raises ClusterError."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.place = cluster.name
        self._read_bytes: dict[str, int] = {}
        """Bytes of each log that `follow` has written."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def versions(self) -> Versions | None:
        """Those of the cluster's environment, asked for where sbatch runs; None where none is named."""
        if self.cluster.environment is None:
            return None
        python = f"{self.cluster.environment.rstrip('/')}/bin/python"
        said = self._shell(f"{shlex.quote(python)} -c {shlex.quote(PROBE)}")
        found = versions_in(said.out)
        if found is None:
            raise ClusterError(
                f"environment of {self.cluster.name}",
                self.cluster.environment,
                f"its Python tells no versions: {said.problem}",
                "name a virtual environment that the nodes see; docs/cluster.md makes one",
            )
        return found

    def submit(
        self, name: str, package: bytes, *, words: Sequence[str], command: str, secrets: Mapping[str, str]
    ) -> str:
        """Unpack the code in a folder of its own, and queue the batch script in it; the job's number.

        words: what follows the script. command: of scaleray, with what belongs to it.
        """
        place = self._path(name)
        python = f"{self.cluster.environment.rstrip('/')}/bin/python" if self.cluster.environment else "python3"
        unpacked = self._shell(
            f"umask 077; test ! -e {place} || {{ echo 'File exists' >&2; exit 1; }}\n"
            f"mkdir -p {place} && cd {place} && cat >{place}.zip && {shlex.quote(python)} -m zipfile -e {place}.zip . "
            f"&& rm {place}.zip || {{ code=$?; cd /; rm -rf {place} {place}.zip; exit $code; }}",
            given=package,
        )
        if unpacked.code:
            self._refuse(unpacked)
        said = self._shell("bash -s", given=self._queueing(name, words, command, secrets).encode())
        found = re.search(r"^scaleray-job (\d+)", said.out, re.M)
        if said.code or found is None:
            self._shell(f"rm -rf {place}")
            self._refuse(said)
        return found[1]

    def _queueing(self, name: str, words: Sequence[str], command: str, secrets: Mapping[str, str]) -> str:
        """A shell script that queues a job. It goes through a pipe: the list of processes shows no values."""
        place, cluster = self._path(name), self.cluster
        names = [*PASSED_ON, *secrets]
        storage = f"{cluster.folder.rstrip('/')}/runs"
        lines = ["set -eu", "umask 077", f"cd {place}"]
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
        lines += [f"job=$({queued})", f'echo "${{job%%;*}}" >{place}.id', 'echo "scaleray-job ${job%%;*}"']
        return "\n".join(lines) + "\n"

    def job(self, name: str) -> JobNow:
        """State of a job in Slurm, by its name or number: from the controller, or from the
        accounting once it is over.
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
        """All jobs that were submitted, the newest first."""
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
        # a number that could not be written, as the folder was full, is none
        ids = [words for words in ids if len(words) > 2 and words[1].isdigit()]
        found = []
        for _, number, name, *rest in sorted(ids, key=lambda words: -int(words[1])):
            mine = [line for line in lines if line.startswith((f"JobId={number} ", f"{number}|"))][:1] or ["unknown"]
            found.append(status_of(name, "\n".join([*mine, *rest]), folder=self.cluster.folder))
        return found

    def logs(self, name: str) -> str:
        """All that a job has printed so far."""
        name, _ = self._found(name)
        return self._shell(f"cat {self._path(name)}.out 2>/dev/null || true", must=True).out

    def stop(self, name: str) -> None:
        """Ask a job to end: a training that runs saves first; a second time ends it at once."""
        name, number = self._found(name)
        place = self._path(name)
        said = self._shell(
            f'if [ "$(squeue --noheader --jobs={number} --format=%T)" = RUNNING ] && [ ! -e {place}.stop ]; then\n'
            f"  touch {place}.stop && scancel --signal=USR1 --batch {number}\n"
            f"else touch {place}.stop && scancel {number}; fi"
        )
        if said.code:
            self._refuse(said)

    def follow(self, name: str, write: Callable[[str], None], say: Callable[[str], None]) -> JobNow:
        """Write what a job prints until it has ended; a connection that is lost is tried again."""
        return follow_by_looking(self.cluster.name, lambda: self.job(name), lambda: self._write_new(name, write), say)

    def _write_new(self, name: str, write: Callable[[str], None]) -> None:
        name, _ = self._found(name)
        begin = self._read_bytes.get(name, 0)
        said = self._shell(f"tail -c +{begin + 1} {self._path(name)}.out 2>/dev/null || true", must=True)
        new = said.raw
        if new:
            self._read_bytes[name] = begin + len(new)
            write(self._decoder.decode(new))

    def _found(self, name: str) -> tuple[str, str]:
        """Name and number of a job that is given by either."""
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
            raise ClusterError("JOB", name, f"{self.cluster.folder} has no job of this name or number", hint)
        return found

    def _path(self, name: str) -> str:
        """A job's folder, quoted for a shell; without a name, the folder of all."""
        folder = self.cluster.folder.rstrip("/") or "/"
        return shlex.quote(f"{folder}/{name}" if name else folder)

    def _shell(self, script: str, *, given: bytes = b"", must: bool = False) -> Said:
        """Run a script where sbatch is. must: whether an error is one of the connection, or of Slurm."""
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
                "ssh", self.cluster.ssh, f"it is not reached: {said.problem}", f"try: ssh {self.cluster.ssh}"
            )
        if must and said.code:
            self._refuse(said)
        return said

    def _refuse(self, said: Said) -> NoReturn:
        allowed, hint = problem_of(said.problem)
        if "cannot be reached" in allowed:
            raise LostConnectionError("--to", self.cluster.name, f"{allowed}: {said.problem}", hint)
        raise ClusterError("--to", self.cluster.name, f"{allowed}: {said.problem}", hint)
