"""`scaleray promote` and `scaleray rollback`: move the alias of a model in MLflow's registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from scaleray.cli.gate import EXIT_CODES
from scaleray.cli.options import AS_OPTIONS, Json, Uri
from scaleray.cli.output import Output, print_json
from scaleray.errors import ConfigError, UsageError
from scaleray.models.model_options import ModelChoice


def promote(
    *runs: str,
    options: Annotated[ModelChoice, AS_OPTIONS] = ModelChoice(),
    alias: Annotated[str | None, Parameter(name="--as")] = None,
    model: str | None = None,
    against: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    policy: Path | None = None,
    study: str | None = None,
    certificates: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    pipeline: Path | None = None,
    cluster: Literal["local", "kubernetes", "slurm", "ray-up"] = "local",
    verify: str | None = None,
    json: Json = False,
) -> int:
    """Register a training's model as a version in MLflow, and assign the alias to it if every gate passes.

    The version contains the weights, config and code of the workload as a model for `mlflow models serve`, the evidence
    and results of the gates, and a provenance statement with the SHA-256 of each file.

    Exit code 0 if it is promoted, 1 if a gate fails, 3 if one is inconclusive and none fails, 2 for bad usage.

    Parameters
    ----------
    runs
        The training of the model; further runs are repeats of it with other seeds.
    alias
        Alias to assign to the version, such as champion. Without it, a version is created
        regardless of the gates' results.
    model
        Name in the registry; by default that of the run's experiment.
    against
        Runs of the baseline.
    policy
        YAML file with the requirements of the gates.
    study
        Scaling study of the training.
    certificates
        Folders or files of certificates of `scaleray verify`.
    pipeline
        Folder to copy the reproducible pipeline to: job file, cluster, alerts, retraining script and drift check. It is
        also among the version's files. With --verify, a folder that must be identical to that of the version.
    cluster
        Type of cluster for the pipeline.
    verify
        Promote nothing: check the version NAME@ALIAS or NAME/VERSION. It checks the alias, every byte, the gates'
        results for the stored evidence, the pipeline, the run and its weights.
    """
    output = Output(json=json)
    if verify is not None:
        if runs:
            raise ConfigError.problem("--verify", "checks a promoted model and takes no RUN", "omit one of them")
        return _verify(verify, output, pipeline=pipeline, uri=options.uri, json=json)
    if not runs:
        raise UsageError.problem("Give", "the RUN of a training", "scaleray promote RUN --as champion")
    from scaleray.release.promote.promote import promote as run_promotion

    with output.running():
        found = run_promotion(
            runs,
            alias,
            model=model,
            against=against or (),
            policy=policy,
            study=study,
            certificates=certificates or (),
            options=options,
            pipeline=pipeline,
            cluster=cluster,
            say=output.say,
        )
    for line in found.lines():
        output.say(line)
    if found.version is not None:
        name = str(found.uri).removeprefix("models:/")
        output.say(
            f"use it: scaleray predict {found.uri} --data FILE --out FILE; check it: scaleray promote --verify {name}"
        )
    if pipeline is not None and found.version is not None:
        output.say(f"pipeline: {pipeline}")
    if json:
        print_json(found.to_dict(), summary=found.summary)
    return EXIT_CODES[found.answer] if found.version is None else 0


def rollback(
    model: str, *, to: int | None = None, unchecked: str | None = None, uri: Uri = None, json: Json = False
) -> int:
    """Assign an alias to an earlier version again, if that version's files are unchanged since its promotion.

    Exit code 0 if the alias was moved, 2 if not.

    Parameters
    ----------
    model
        NAME@ALIAS, such as digits@champion.
    to
        Version; by default the last one that had the alias before the present one, without those from which it was
        withdrawn.
    unchecked
        Reason for moving the alias without checking the files, if they cannot be fetched. It is stored as a tag of the
        version.
    """
    from scaleray.release.promote.rollback import rollback as run_rollback

    output = Output(json=json)
    with output.running():
        number = run_rollback(model, to=to, unchecked=unchecked, uri=uri)
    output.say(f"{model} is now version {number}; to check the rest of it: scaleray promote --verify {model}")
    if json:
        print_json({"model": model, "version": number})
    return 0


def _verify(name: str, output: Output, *, pipeline: Path | None, uri: str | None, json: bool) -> int:
    from rich.console import Console

    from scaleray.release.printed_gates import show_gates
    from scaleray.release.promote.verify_promoted import check_promoted

    with output.running():
        record = check_promoted(name, pipeline=pipeline, uri=uri)
    show_gates(Console(stderr=json), record)
    if json:
        print_json(record.to_dict(), summary=record.summary)
    return EXIT_CODES[record.answer]
