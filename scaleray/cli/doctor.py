"""`scaleray doctor`: check a cluster before training on it."""

from __future__ import annotations

from pathlib import Path

from scaleray.cli.options import ConfigFile, Flag, Json, Overrides
from scaleray.cli.output import Output, print_json


def doctor(
    *overrides: Overrides,
    config: ConfigFile = None,
    address: str | None = None,
    local: Flag = False,
    storage: str | None = None,
    uri: str | None = None,
    network: str | None = None,
    collectives: Path | None = None,
    strict: Flag = False,
    json: Json = False,
) -> int:
    """Check every node of a cluster before GPUs are paid for, in less than a minute; or this machine.

    It checks versions, GPUs, drivers, system limits, shared memory, disks, clocks, ports, the shared storage, MLflow,
    matrix products of every GPU, all-reduces within and between nodes, and each link between two nodes. Every check is
    red, yellow or green, with advice. GPUs in use are not touched.

    Exit code 0 if no check is red, 1 if one is, 2 for bad usage. With a config, its storage and MLflow are checked, and
    its keys can be given as options, as for train.

    Parameters
    ----------
    address
        HOST:PORT of the cluster's head; by default RAY_ADDRESS, or this machine if that is not set.
    local
        Check this machine, without Ray.
    storage
        Folder or s3:// URI for runs, instead of the config's.
    uri
        MLflow's tracking URI, instead of the config's. If one is configured in any way, the record is stored there.
    network
        Network between nodes in the planner's notation, such as 100G or 8x400G, to compare all-reduces with. By default
        the usual one for these GPUs.
    collectives
        File for the measured all-reduces, for `scaleray plan --collectives`.
    strict
        Exit code 1 for yellow too.
    """
    output = Output(json=json)
    with output.running():
        from scaleray.clusters.doctor.doctor import doctor as look
        from scaleray.clusters.doctor.printed_findings import show_preflight
        from scaleray.records.doctor_record import RED, YELLOW

        resolved = None
        if config is not None or overrides:
            from scaleray.config import load_config

            resolved = load_config(config, flags=overrides)
        record = look(
            resolved,
            address=address,
            local=local,
            storage=storage,
            uri=uri,
            network=network,
            collectives=collectives,
            say=output.say,
        )
    show_preflight(output.console, record)
    if json:
        written = {"collectives": str(collectives.absolute())} if collectives else None
        print_json(record.to_dict(), written=written, summary=record.summary)
    return int(record.worst in ((RED, YELLOW) if strict else (RED,)))
