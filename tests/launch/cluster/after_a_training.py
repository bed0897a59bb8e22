"""A command of scaleray that follows another one, for the test of the ports that commands open: evaluate, predict, path."""

import subprocess
import sys
from pathlib import Path

HOME = Path.home()
JOB = ["-c", "jobs/digits.yaml", "--tracking.uri", f"sqlite:///{HOME}/mlflow.db"]
PLACE = ["--checkpoint.storage-path", str(HOME / "runs")]
LONG = ["--stop.after", "100000 epochs"]
RUN = str(HOME / "runs" / "first")


def scaleray(*words: str) -> None:
    """Run a command to its end."""
    subprocess.run([sys.executable, "-m", "scaleray", *words], check=True)


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "path":
        wanted = ["--target", "test/accuracy >= 0.95", "--workers", "2"]
        scaleray("path", "start", *JOB, *PLACE, *LONG, *wanted, "--name", "of-a-test")
        scaleray("path", "next", "--name", str(HOME / "runs" / "path-of-a-test"))
    else:
        scaleray("train", *JOB, *PLACE, "--local", "--stop.after", "2 epochs", "--tracking.run-name", "first")
        scaleray(name, RUN, *(["--split", "test", "--out", f"{HOME}/answers.parquet"] if name == "predict" else []))
