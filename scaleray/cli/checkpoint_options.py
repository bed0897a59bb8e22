"""Options of the commands that look at checkpoints."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

Where = Annotated[
    str, Parameter(help="A run folder, local or s3://; a run's name in the storage path; or one checkpoint's folder.")
]
Step = Annotated[int | None, Parameter(help="Optimizer steps of the checkpoint; by default the newest complete one.")]
CopyPath = Annotated[
    str | None, Parameter(help="Where the second copies are, as checkpoint.copy_path; by default as the run says.")
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on stdout.")]
