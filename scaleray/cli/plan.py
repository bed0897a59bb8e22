"""`scaleray plan`: what would N GPUs of another kind give, and how sure is that? Arithmetic only: neither torch nor Ray is imported."""

from __future__ import annotations

import dataclasses
import json as json_library
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from scaleray.errors import ConfigError, StorageError, UsageError

if TYPE_CHECKING:
    from scaleray.planner.advise import Advice
    from scaleray.planner.outlook import Outlook
    from scaleray.planner.to_target import Way

plan_app = App(
    name="plan",
    help="Predict memory, step time and efficiency on a cluster, and rank the layouts.",
    help_format="plaintext",
)

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON on stdout.")]
Hardware = Annotated[Path | None, Parameter(help="YAML file with GPUs, links and networks of your own.")]


@plan_app.default
def plan(
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    config: Annotated[Path | None, Parameter(name=["--config", "-c"], help="YAML file of the run.")] = None,
    model: str | None = None, profile: Path | None = None, cluster: str | None = None, here: Annotated[bool, Parameter(negative="")] = False,
    address: str | None = None, network: str | None = None,
    global_batch: int | None = None, sequence: int | None = None, precision: str | None = None, strategies: str = "ddp,zero1,fsdp,hsdp,tp,pp,ep",
    optimizer: Literal["adam", "momentum", "sgd"] | None = None, compiled: Annotated[bool, Parameter(negative="")] = False,
    step_time: float | None = None, micro_batch: int | None = None, from_run: Path | None = None,
    input_rate: float | None = None,
    samples: Annotated[float | None, Parameter(name=["--samples", "--target-samples"])] = None, target_steps: float | None = None,
    noise_scale: float | None = None, rank: Annotated[str, Parameter(name=["--rank", "--rank-by"])] = "throughput", rows: int = 10,
    checkpoint_minutes: float | None = None, waits_for_checkpoints: Annotated[bool, Parameter(name="--checkpoints-wait", negative="")] = False,
    hardware: Hardware = None, collectives: Path | None = None, write: Path | None = None, html: Path | None = None, json: Json = False,
) -> int:  # fmt: skip
    """Rank the layouts of a model on a cluster.

    Parameters
    ----------
    model
        A model by name (llama-70b, gpt2-xl, resnet-50) or size (gpt-13b).
    profile
        A workload's counted costs, as training.model_profile writes them.
    cluster
        GPU:PERNODExNODES[,net=...][,link=...][,price=...], as in h100:8x16 or a100-80:8x64,net=200G; or a YAML file.
    here
        The GPUs of this machine instead of --cluster.
    address
        With --here: the GPUs of the Ray cluster there (host:port, ray://host:port or auto) instead of this machine's.
    network
        Of that cluster's nodes, which Ray does not know: by name, 100G or 8x400G; by default as such machines usually have.
    global_batch
        Samples of an optimizer step, over all GPUs; by default the config's, or about 4 million tokens (32 images a GPU).
    sequence
        Tokens of a sample.
    precision
        bf16, fp16, fp8, tf32 or fp32; by default the GPU's usual 16 bits, or the config's.
    strategies
        Names with commas: ddp, zero1, fsdp, hsdp, tp, pp, ep (experts of a mixture, spread over GPUs).
    optimizer
        Decides the size of the state: adam 8 bytes a parameter, momentum 4, sgd none. The config's, or adam.
    compiled
        The model is compiled.
    step_time
        Seconds of a step measured on one GPU of the cluster's kind, with --micro-batch samples: the compute is scaled to it.
    micro_batch
        Samples of the measured step.
    from_run
        Record of a run or study on one worker or more, whose smallest point takes the place of --step-time; or of a sweep.
    input_rate
        Samples a second that the input pipeline of one node delivers.
    samples
        Samples of the whole training at --global-batch: the plan says how long it takes.
    target_steps
        The same in optimizer steps.
    noise_scale
        Gradient noise scale in samples, measured at --global-batch: what a sample is worth in larger and smaller batches.
    rank
        throughput, cost and time (the same on given GPUs), memory; or time-to-target, which looks for the batch size as well: with
        --noise-scale and a target, or --from-run with a run, study or sweep that measured them.
    checkpoint_minutes
        Training between two checkpoints; by default what is best for the cluster file's gpu_mtbf_hours.
    waits_for_checkpoints
        Checkpoints are synchronous: the training waits until storage has them.
    rows
        Layouts to show.
    collectives
        All-reduces measured on the cluster: what nccl-tests' all_reduce_perf printed, or CSV (ranks,nodes,bytes,seconds).
    write
        Write the best layout that `scaleray train` can run as a config, onto -c where it is given.
    html
        Write the plan as one HTML page.
    """
    from rich.console import Console

    from scaleray.cli.plan_question import question_of
    from scaleray.cli.plan_record import plan_record
    from scaleray.cli.plan_target import target_of
    from scaleray.cli.plan_write import write_config
    from scaleray.planner.advise import advise
    from scaleray.planner.checkpoints import checkpoint_cost, is_asked
    from scaleray.planner.outlook import outlook
    from scaleray.planner.to_target import best_way, ways_to
    from scaleray.reports.plan import plan_view
    from scaleray.reports.plan_target import way_table
    from scaleray.reports.record_terminal import print_whole, width_of
    from scaleray.reports.terminal_tables import as_rich

    question = question_of(
        overrides=overrides, config=config, model=model, profile=profile, cluster=cluster, here=here, global_batch=global_batch, sequence=sequence,
        precision=precision, strategies=strategies, optimizer=optimizer, compiled=compiled, step_time=step_time, micro_batch=micro_batch,
        from_run=from_run, input_rate=input_rate, rank_by=rank, hardware=hardware, collectives=collectives, address=address, network=network,
    )  # fmt: skip
    interval_s = None if checkpoint_minutes is None else 60 * checkpoint_minutes
    ways: list[Way] = []
    if rank == "time-to-target":
        target = target_of(
            batch_size=question.global_batch, noise_scale=noise_scale, samples=samples, steps=target_steps, from_run=from_run
        )  # fmt: skip
        ways = ways_to(target, question, interval_s=interval_s, is_asynchronous=not waits_for_checkpoints)
        chosen = best_way(ways, num_gpus=question.cluster.num_gpus)
        if chosen is not None:
            question = dataclasses.replace(question, global_batch=chosen.batch_size)
            samples = chosen.samples.value
    elif noise_scale is not None:
        raise ConfigError("--noise-scale", noise_scale, "it decides nothing here", "add --rank time-to-target")
    elif target_steps is not None:
        samples = target_steps * question.global_batch if samples is None else samples
    advice = advise(question)
    kept = checkpoint_cost(
        question.model, advice.best.layout, question.cluster, interval_s=interval_s, is_asynchronous=not waits_for_checkpoints
    )  # fmt: skip
    shown = kept if is_asked(question.cluster, interval_s) or waits_for_checkpoints else None
    seen = outlook(advice)
    console = Console(stderr=json)
    width = width_of(console)
    if ways:
        print_whole(
            console, as_rich(way_table(ways, num_gpus=question.cluster.num_gpus, words=target.words), width=width)
        )
    print_whole(console, plan_view(advice, seen, rows=rows, width=width, num_samples=samples, kept=shown))
    if write is not None:
        for line in write_config(advice, config, write):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if html is not None:
        _write_page(html, advice, seen, rows=rows, kept=shown, ways=ways)
        console.print(f"page: {html}", highlight=False, markup=False, soft_wrap=True)
    if json:
        print(json_library.dumps(plan_record(advice, seen, rows=rows, kept=shown, ways=ways), indent=2))
    return 0


@plan_app.command
def explain(what: str = "constants", /, *, model: str | None = None, cluster: str | None = None, global_batch: int | None = None,
            sequence: int | None = None, precision: str | None = None, strategies: str = "ddp,zero1,fsdp,hsdp,tp,pp,ep", rows: int = 20) -> int:  # fmt: skip
    """Say what the planner's figures are and where they come from, why layouts were dropped, or what a step does when.

    Parameters
    ----------
    what
        constants; a GPU, link or network by name; intervals; or, with --model, --cluster and --global-batch: layouts (why they were
        dropped), step (the recommended layout's, simulated task by task).
    rows
        Layouts or streams to list.
    """
    from scaleray.planner.explain import (
        explain_constants,
        explain_hardware,
        explain_intervals,
        explain_layouts,
        explain_step,
    )

    if what == "constants":
        lines = explain_constants()
    elif what == "intervals":
        lines = explain_intervals()
    elif what in ("layouts", "step"):
        from scaleray.cli.plan_question import question_of

        question = question_of(
            model=model,
            cluster=cluster,
            global_batch=global_batch,
            sequence=sequence,
            precision=precision,
            strategies=strategies,
        )
        lines = (explain_layouts if what == "layouts" else explain_step)(question, rows=rows)
    else:
        lines = explain_hardware(what)
    print("\n".join(lines))
    return 0


@plan_app.command
def validate(
    *data: Path,
    by: Literal["both", "source", "family"] = "both",
    skipped: bool = True,
    transfers: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> int:
    """Run the planner over folders of published measurements, beside the model that knows nothing.

    Parameters
    ----------
    data
        Folders of JSON files; their format is described in planner.published.rows.
    by
        Lines for each source, each family, or both.
    skipped
        List the rows that were not judged, with the reason. --no-skipped leaves them out.
    transfers
        Judge the intervals instead where rows are predicted from others that are far from them: from another kind of GPU, from an eighth of the
        GPUs, from another layout.
    """
    from rich.console import Console

    from scaleray.planner.transfers import transfer_scores, transferred
    from scaleray.planner.validate import judge, score, scores
    from scaleray.reports.plan import score_table, skipped_lines, transfer_table
    from scaleray.reports.record_terminal import print_whole, width_of
    from scaleray.reports.terminal_tables import as_rich

    seen, left_out = _observations(data)
    if transfers:
        lines = transfer_scores(transferred(seen))
        print_whole(console := Console(stderr=json), as_rich(transfer_table(lines), width=width_of(console)))
        if json:
            print(json_library.dumps({"transfers": [dataclasses.asdict(line) for line in lines]}, indent=2))
        return 0
    judged = judge(seen)
    tables = {
        "source": scores(judged, lambda one: one.seen.source),
        "family": scores(judged, lambda one: one.seen.family),
        "all": [score("all", judged)],
    }
    console = Console(stderr=json)
    for name in ("source", "family", "all"):
        if by in ("both", name) or name == "all":
            made = score_table(f"by {name}" if name != "all" else "all rows", tables[name])
            print_whole(console, as_rich(made, width=width_of(console)))
    if skipped:
        for line in (f"{len(left_out)} rows not judged:", *skipped_lines(left_out)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if json:
        print(json_library.dumps(
            {name: [dataclasses.asdict(line) for line in lines] for name, lines in tables.items()}
            | {"skipped": [dataclasses.asdict(one) for one in left_out]}, indent=2))  # fmt: skip
    return 0


@plan_app.command
def fit(*data: Path, rounds: int = 3, leave_out: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Fit the planner's constants to folders of published measurements, and print them beside those it has.

    Parameters
    ----------
    rounds
        Passes over the constants, with steps that shrink.
    leave_out
        Fit once without each source instead, and judge that source: how well the constants carry over.
    """
    from rich.console import Console

    from scaleray.planner import fit as fitting
    from scaleray.planner.constants import DEFAULT, FITTED
    from scaleray.planner.validate import score, scores
    from scaleray.reports.plan import score_table
    from scaleray.reports.record_terminal import print_whole, width_of
    from scaleray.reports.terminal_tables import as_rich

    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    seen, _ = _observations(data)
    if leave_out:
        judged = fitting.leave_one_source_out(seen, rounds=rounds, say=say)
        lines = [*scores(judged, lambda one: one.seen.source), score("all", judged)]
        made = score_table("each source with constants fitted without it", lines)
        print_whole(console, as_rich(made, width=width_of(console)))
    else:
        found = fitting.fit(fitting.thinned(seen), rounds=rounds, say=say)
        own = fitting.loss_of(fitting.thinned(seen), DEFAULT)
        say(f"loss {found.start_loss:.4f} before, {found.loss:.4f} with these, {own:.4f} with the package's:")
        for name in FITTED:
            say(f"  {name:<26} {getattr(DEFAULT, name):<10.4g} -> {getattr(found.constants, name):.4g}")
        from scaleray.planner.validate import judge

        judged = judge(seen, found.constants, with_pollux=False)
    say("intervals that hold 90 % of rows, as logarithms of measured over predicted:")
    for kind, (low, high, count) in sorted(fitting.spreads(judged).items()):
        say(f"  {kind:<26} {low:+.3f} to {high:+.3f}   ({count} rows)")
    return 0


def _observations(data: tuple[Path, ...]) -> tuple[list[Any], list[Any]]:
    from scaleray.planner.published import observations, read_folder

    if not data:
        raise ConfigError(
            "data", None, "at least one folder of published measurements is needed", "scaleray plan validate FOLDER"
        )
    for folder in data:
        if not folder.is_dir():
            raise UsageError("data folder", str(folder), "it is not a folder")
    return observations([row for folder in data for row in read_folder(folder)])


def _write_page(path: Path, advice: Advice, seen: Outlook, **shown: Any) -> None:
    from scaleray.config.base import without_password
    from scaleray.reports.plan_page import plan_page

    page = plan_page(advice, seen, command=f"scaleray {shlex.join(map(without_password, sys.argv[1:]))}", **shown)
    try:
        path.write_text(page)
    except OSError as exc:
        raise StorageError("--html", str(path), f"it cannot be written: {exc.strerror}", "choose another file") from exc
