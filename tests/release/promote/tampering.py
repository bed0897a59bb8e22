"""Evidence that was changed after it was recorded, in every place that decides on a promotion, and what finds it.

`test_tampering.py` asks about each, and keeps the table of tampering.md equal to this one, which
`python -m tests.release.promote.tampering` writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from scaleray.checkpoints.catalog import FOLDER, Catalog
from scaleray.checkpoints.manifest import FILE_NAME, StoredFile
from scaleray.models.registry import STATEMENT_TAG
from scaleray.recording.store import open_client
from scaleray.records.experiment import CERTIFICATE_SHA256
from scaleray.records.statement import STATEMENT, file_digest
from scaleray.studies.invalidate import invalidate_experiment

GATE, VERIFY, PROMOTE, STEP = "gate", "promote --verify", "promote", "promote --step N"


@dataclass(frozen=True)
class Recorded:
    """What a tampering may change. root: a run with its study and its certificate; source: the folder of a version
    that was promoted; run: the folder of the run that it is of; uri: of the MLflow that has both."""

    root: Path
    source: Path
    run: Path
    run_id: str
    uri: str

    @property
    def client(self) -> Any:
        """MLflow's client."""
        return open_client(self.uri)

    def ids(self) -> dict[str, str]:
        """The runs in MLflow of the run, the study, its largest point and the certificate."""
        files = {"run": "run/record.json", "study": "study/record.json", "verify": "verify/certificate.json"}
        values = {name: json.loads((self.root / file).read_text()) for name, file in files.items()}
        point = values["study"]["curves"][0]["points"][1]["point"]["run_id"]
        return {**{name: one["run_id"] for name, one in values.items()}, "point": point}


@dataclass(frozen=True)
class Tampering:
    """One kind. by: the command that is asked; missed: why it is not found, where it is not."""

    place: str
    what: str
    change: Callable[[Recorded], None]
    by: str
    missed: str = ""


TAMPERINGS: list[Tampering] = []


def tampering(place: str, what: str, by: str = GATE, missed: str = "") -> Callable[..., Any]:
    """Enter a kind into the table."""

    def enter(change: Callable[[Recorded], None]) -> Callable[[Recorded], None]:
        TAMPERINGS.append(Tampering(place, what, change, by, missed))
        return change

    return enter


def edit(file: Path, change: Callable[[Any], object]) -> None:
    """Change a JSON file."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def _edits(place: str, name: str, of: str, changes: dict[str, Callable[[Any], object]]) -> None:
    for what, change in changes.items():
        tampering(place, what)(lambda at, change=change: edit(at.root / of / name, change))


_edits("record", "record.json", "run", {
    "the loss at its end is lower": lambda v: v.update(final_loss=0.0),
    "a metric is added": lambda v: v["metrics"].update({"test/accuracy": 0.99}),
    "an evaluation is better": lambda v: v["evaluations"].update({"test/accuracy": [[1, 0.99]]}),
    "the learning rate is another": lambda v: v["derived"].update(learning_rate=9.0),
    "its alerts are gone": lambda v: v.update(alerts=[]),
    "an alert is less severe": lambda v: v["alerts"][0].update(severity="info"),
    "steps that were not finite are none": lambda v: v.update(nonfinite_steps=-1),
    "its seed is another": lambda v: v["config"].update(seed=99),
    "it was trained on more workers": lambda v: v.update(workers=64),
    "its workers had other GPUs": lambda v: v["environment"]["workers"][0]["accelerators"].update(names=["B200"]),
    "its code is of another commit": lambda v: v["environment"]["environment"]["git"].update(commit="f" * 40),
    "its data have another hash": lambda v: v["data"]["train"].update(sha256="f" * 64),
    "its time is shorter": lambda v: v.update(total_time_s=1.0),
    "the hash of its weights is another": lambda v: v.update(weights={"weights.pt": {"sha256": "0" * 64, "num_bytes": 1}}),
    "it names another run of MLflow": lambda v: v.update(run_id="0" * 32),
})  # fmt: skip


@tampering("record", "it names a forged MLflow that says the same")
def _(at: Recorded) -> None:
    forged = shutil.copy(at.uri.removeprefix("sqlite:///"), at.root / "forged.db")
    file = at.root / "run/record.json"
    edit(file, lambda v: v.update(final_loss=0.0, tracking_uri=f"sqlite:///{forged}"))
    folder = at.root / "forged"
    folder.mkdir()
    shutil.copy(file, folder)
    with sqlite3.connect(forged) as database:
        database.execute("update runs set artifact_uri = ? where run_uuid = ?", (str(folder), at.ids()["run"]))


@tampering(
    "record",
    "it and MLflow's copy are rewritten alike",
    missed="nothing is signed, so that a change of both copies leaves no trace",
)
def _(at: Recorded) -> None:
    edit(at.root / "run/record.json", lambda v: v.update(total_time_s=1.0))
    at.client.log_artifact(at.ids()["run"], str(at.root / "run/record.json"))


@tampering("alerts", "the file is empty")
def _(at: Recorded) -> None:
    (at.root / "run/alerts.jsonl").write_text("")


@tampering("alerts", "the file is gone")
def _(at: Recorded) -> None:
    (at.root / "run/alerts.jsonl").unlink()


@tampering("alerts", "file and record lack it, and MLflow's mark does not")
def _(at: Recorded) -> None:
    (at.root / "run/alerts.jsonl").write_text("")
    edit(at.root / "run/record.json", lambda v: v.update(alerts=[]))
    at.client.log_artifact(at.ids()["run"], str(at.root / "run/record.json"))


_edits("study", "record.json", "study", {
    "an efficiency is higher": lambda v: v["curves"][0]["points"][1]["efficiency"].update(low=0.99),
    "a turn is added": lambda v: v["curves"][0]["points"][1]["point"]["turns"].append([0.01] * 30),
    "a turn is gone": lambda v: v["curves"][0]["points"][1]["point"]["turns"].pop(),
    "it is of another config": lambda v: v.update(config={"seed": 5}),
    "it was measured in another environment": lambda v: v["conditions"]["environment"].update(python="3.99"),
    "it names another run of MLflow": lambda v: v.update(run_id="0" * 32),
})  # fmt: skip


@tampering("study", "a number of a point is logged once more in MLflow")
def _(at: Recorded) -> None:
    point = at.ids()["point"]
    name = next(name for name in at.client.get_run(point).data.metrics if "samples_per_s" in name)
    at.client.log_metric(point, name, 1e9, timestamp=2 * 10**12)


@tampering("study", "a point is deleted in MLflow")
def _(at: Recorded) -> None:
    at.client.delete_run(at.ids()["point"])


@tampering("study", "a point is declared invalid")
def _(at: Recorded) -> None:
    invalidate_experiment(at.ids()["point"], "a neighbour ran", uri=at.uri)


@tampering("study", "the study is declared invalid")
def _(at: Recorded) -> None:
    invalidate_experiment(at.ids()["study"], "the fan was off", uri=at.uri)


_edits("certificate", "certificate.json", "verify", {
    "its verdict is another": lambda v: v.update(verdict="the same training, surely"),
    "its bound is smaller": lambda v: v.update(bound=1e-12),
    "it is of more workers": lambda v: v.update(world_sizes=[1, 2, 4, 8]),
    "it is of more strategies": lambda v: v.update(strategies=["ddp", "fsdp"]),
    "its date is newer": lambda v: v.update(date="2026-11-01T00:00:00+0000"),
    "its workers had other GPUs": lambda v: v.update(outcomes=[]),
    "it names another run of MLflow": lambda v: v.update(run_id="0" * 32),
})  # fmt: skip


@tampering("certificate", "its hash in MLflow is another")
def _(at: Recorded) -> None:
    at.client.set_tag(at.ids()["verify"], CERTIFICATE_SHA256, "0" * 64)


@tampering("MLflow", "its copy of the record is another")
def _(at: Recorded) -> None:
    other = at.root / "other"
    other.mkdir()
    edit(Path(shutil.copy(at.root / "run/record.json", other)), lambda v: v.update(final_loss=9.0))
    at.client.log_artifact(at.ids()["run"], str(other / "record.json"))


@tampering("MLflow", "its run is deleted")
def _(at: Recorded) -> None:
    at.client.delete_run(at.ids()["run"])


@tampering("certificate", "its run in MLflow is deleted")
def _(at: Recorded) -> None:
    at.client.delete_run(at.ids()["verify"])


@tampering("study", "its run in MLflow is deleted")
def _(at: Recorded) -> None:
    at.client.delete_run(at.ids()["study"])


@tampering("MLflow", "its run is declared invalid")
def _(at: Recorded) -> None:
    invalidate_experiment(at.ids()["run"], "another job ran beside it", uri=at.uri)


@tampering("MLflow", "one more point of a metric", missed="it turns nothing: the gates judge by the record")
def _(at: Recorded) -> None:
    at.client.log_metric(at.ids()["run"], "test/accuracy", 0.99, step=1)


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Callable[[Recorded], None]:
    def make(at: Recorded) -> None:
        file = next(at.source.glob(name))
        file.write_bytes(change(file.read_bytes()))

    return make


for _place, _what, _name, _change in (
    (
        "weights",
        "one bit of the packed ones",
        "data/packed/weights/*.safetensors",
        lambda c: c[:-2] + bytes([c[-2] ^ 1]) + c[-1:],
    ),
    ("weights", "the packed ones end early", "data/packed/weights/*.safetensors", lambda c: c[:-100]),
    ("code", "the workload's file", "data/packed/code/corners.py", lambda c: c + b"\n# changed\n"),
    (
        "version",
        "the config of the packed run",
        "data/packed/run.json",
        lambda c: c.replace(b'"seed": 0', b'"seed": 7'),
    ),
    ("version", "the requirements", "requirements.txt", lambda c: c + b"\nmore\n"),
    ("version", "MLflow's own note of the model", "MLmodel", lambda c: c.replace(b"packed", b"other")),
    ("version", "what the gates answered", "gates.json", lambda c: c.replace(b'"pass"', b'"fail"', 1)),
    (
        "record",
        "one of the kept evidence",
        "evidence/candidates/0/record.json",
        lambda c: c.replace(b'"FINISHED"', b'"FAILED"'),
    ),
    (
        "policy",
        "that of the kept evidence",
        "evidence/evidence.json",
        lambda c: c.replace(b'"min_runs": 2', b'"min_runs": 9'),
    ),
):
    tampering(_place, f"{_what}: changed", VERIFY)(_bytes(_name, _change))


@tampering("code", "a module is added", VERIFY)
def _(at: Recorded) -> None:
    (at.source / "data/packed/code/more.py").write_text("x = 1\n")


@tampering("version", "a file is gone", VERIFY)
def _(at: Recorded) -> None:
    (at.source / "requirements.txt").unlink()


@tampering("statement", "it is gone", VERIFY)
def _(at: Recorded) -> None:
    (at.source / STATEMENT).unlink()


def _restate(at: Recorded) -> str:
    """Let the statement have the hashes that the files have now; gives its own."""

    def change(values: Any) -> None:
        for one in values["subject"]:
            one["digest"]["sha256"] = file_digest(at.source / one["name"])

    edit(at.source / STATEMENT, change)
    return file_digest(at.source / STATEMENT)


@tampering("statement", "it is rewritten with the code", VERIFY)
def _(at: Recorded) -> None:
    _bytes("data/packed/code/corners.py", lambda c: c + b"\n# changed\n")(at)
    _restate(at)


@tampering("statement", "its hash in the registry is another", VERIFY)
def _(at: Recorded) -> None:
    at.client.set_model_version_tag("corners", "1", STATEMENT_TAG, "0" * 64)


@tampering("statement", "it, the weights and its hash in the registry are rewritten alike", VERIFY)
def _(at: Recorded) -> None:
    _negate(next(at.source.glob("data/packed/weights/*.safetensors")))
    at.client.set_model_version_tag("corners", "1", STATEMENT_TAG, _restate(at))


@tampering("statement", "it, the code and its hash in the registry are rewritten alike", VERIFY,
           missed="nothing is signed, so that a change of both copies leaves no trace")  # fmt: skip
def _(at: Recorded) -> None:
    _bytes("data/packed/code/corners.py", lambda c: c + b"\n# changed\n")(at)
    at.client.set_model_version_tag("corners", "1", STATEMENT_TAG, _restate(at))


def _negate(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    last = list(tensors)[-1]
    save_file({**tensors, last: -tensors[last]}, file, metadata={"format": "pt"})


@tampering("registry", "the alias is set by hand on another version", VERIFY)
def _(at: Recorded) -> None:
    made = at.client.create_model_version("corners", str(at.source), run_id=at.run_id)
    at.client.set_registered_model_alias("corners", "champion", made.version)


@tampering("registry", "its source run exists is deleted", VERIFY)
def _(at: Recorded) -> None:
    at.client.delete_run(at.run_id)


@tampering("weights", "the last layer of the run's own is negated", VERIFY)
def _(at: Recorded) -> None:
    state = torch.load(at.run / "weights.pt", weights_only=True)
    last = list(state)[-1]
    torch.save({**state, last: -state[last]}, at.run / "weights.pt")


@tampering("weights", "the run's own and their hash in its folder are rewritten alike", VERIFY)
def _(at: Recorded) -> None:
    state = torch.load(at.run / "weights.pt", weights_only=True)
    last = list(state)[-1]
    torch.save({**state, last: -state[last]}, at.run / "weights.pt")
    content = (at.run / "weights.pt").read_bytes()
    stored = {"sha256": hashlib.sha256(content).hexdigest(), "num_bytes": len(content)}
    edit(at.run / "weights.sha256.json", lambda v: v["weights.pt"].update(stored))
    edit(at.run / "record.json", lambda v: v["weights"]["weights.pt"].update(stored))


def forge_checkpoint(run: Path) -> int:
    """Negate the newest checkpoint's float32 tensors, and rewrite every hash in its folder alike; gives its step."""
    manifest = next(Catalog.of_run(str(run)).complete())
    content = {name: bytearray((run / FOLDER / name).read_bytes()) for name in manifest.files}
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks if tensor.dtype == "float32" else ():
            for place in range(chunk.start + 3, chunk.start + chunk.length, 4):
                content[chunk.file][place] ^= 0x80
    for name, changed in content.items():
        (run / FOLDER / name).write_bytes(changed)

    def digest(chunk: Any) -> str:
        return xxhash.xxh3_128_hexdigest(content[chunk.file][chunk.start : chunk.start + chunk.length])

    tensors = {
        name: dataclasses.replace(
            tensor, chunks=tuple(dataclasses.replace(chunk, digest=digest(chunk)) for chunk in tensor.chunks)
        )
        for name, tensor in manifest.tensors.items()
    }
    files = {name: StoredFile(hashlib.sha256(changed).hexdigest(), len(changed)) for name, changed in content.items()}
    forged = dataclasses.replace(manifest, tensors=tensors, files=files)
    (run / FOLDER / manifest.name / FILE_NAME).write_text(forged.to_json())
    return manifest.step


@tampering(
    "weights", "the run's own are gone, and its newest checkpoint and all hashes in it are rewritten alike", PROMOTE
)
def _(at: Recorded) -> None:
    forge_checkpoint(at.run)
    for name in ("weights.pt", "weights.sha256.json"):
        (at.run / name).unlink()


@tampering("weights", "a checkpoint and all hashes in it are rewritten alike", STEP)
def _(at: Recorded) -> None:
    forge_checkpoint(at.run)


@contextlib.contextmanager
def put_back(*places: Path) -> Iterator[None]:
    """A context whose changes of these files and folders are gone with it."""
    kept = {place: place.with_name(f"{place.name}.kept") for place in places}
    for place, copy in kept.items():
        (shutil.copytree if place.is_dir() else shutil.copy)(place, copy)
    try:
        yield
    finally:
        for place, copy in kept.items():
            if copy.is_dir():
                shutil.rmtree(place)
                copy.rename(place)
            else:  # written over: a connection to the database may be open
                shutil.copy(copy, place)
                copy.unlink()


def as_markdown() -> str:
    """The table of tampering.md."""
    rows = ["| Changed | How | Asked | Found |", "|---|---|---|---|"]
    for one in TAMPERINGS:
        rows.append(f"| {one.place} | {one.what} | `{one.by}` | {(one.missed and f'no: {one.missed}') or 'yes'} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    page = Path(__file__).with_suffix(".md")
    page.write_text(page.read_text().partition("|")[0] + as_markdown())
