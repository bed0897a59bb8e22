"""`scaleray promote` and `scaleray rollback`: which version of a model an alias in MLflow's registry names."""

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
    """Register a training's model as a version in MLflow, and let an alias name it if every gate passes.

    The version has the weights, config and code of the workload as a model that `mlflow models serve` serves, the
    evidence of the gates and their answers, and a statement of where it comes from with the SHA-256 of each file.

    Exit code 0 when it is promoted, 1 when a gate fails, 3 when one is inconclusive and none fails, 2 for bad usage.

    Parameters
    ----------
    runs
        The training whose model it is; more runs repeat it with other seeds.
    alias
        Alias to let name the version, such as champion. Without it a version is made whatever the gates answer.
    model
        Name in the registry; by default that of the run's experiment.
    against
        Runs of the baseline.
    policy
        YAML file of what the gates ask.
    study
        Scaling study of the training.
    certificates
        Folders or files of certificates of `scaleray verify`.
    pipeline
        Folder to copy the repeatable pipeline to: job file, cluster, alerts, retraining script and drift check. It is
        among the version's files as well. With --verify, a folder that must still be that of the version.
    cluster
        Kind of cluster that the pipeline is for.
    verify
        Promote nothing: check what NAME@ALIAS or NAME/VERSION names. The alias, every byte, the gates' answers to the
        kept evidence, the pipeline, the run and its weights.
    """
    output = Output(json=json)
    if verify is not None:
        if runs:
            raise ConfigError("--verify", verify, "it checks a promoted model and takes no RUN")
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
    """Let an alias name an earlier version again, if that version's files are those of its promotion.

    Exit code 0 when the alias names it, 2 when it stays.

    Parameters
    ----------
    model
        NAME@ALIAS, such as digits@champion.
    to
        Version; by default the one that had the alias last before the present one, without those from which it was
        taken back.
    unchecked
        Reason for moving the alias without a look at the files, if they cannot be fetched. A tag of the version keeps
        it.
    """
    from scaleray.release.promote.rollback import rollback as run_rollback

    output = Output(json=json)
    with output.running():
        number = run_rollback(model, to=to, unchecked=unchecked, uri=uri)
    output.say(f"{model} names version {number}; check the rest of it: scaleray promote --verify {model}")
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
