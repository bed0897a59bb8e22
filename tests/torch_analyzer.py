"""torch's own analyzer of Flight Recorder dumps, as an oracle: it reads pickles of NCCL, so ours are put into that form.

Its repair for gloo: names and members of groups, which gloo leaves empty.
"""

from __future__ import annotations

import argparse

from scaleray.records.hangs import RankDump


def first_trouble(dumps: dict[int, RankDump]) -> tuple[int, set[int]] | None:
    """Sequence number and missing ranks of the first collective that does not match."""
    from torch.distributed.flight_recorder.components.builder import build_db

    known = {rank: dump for rank, dump in dumps.items() if dump.calls is not None}
    details = {f"rank{rank}": _details(rank, dump) for rank, dump in known.items()}
    args = argparse.Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10)
    found = build_db(details, args, "2.10")
    for collective in found.collectives:
        if not collective.pass_check or collective.missing_ranks:
            return collective.collective_seq_id, set(collective.missing_ranks or ())
    return None


def _details(rank: int, dump: RankDump) -> dict[str, object]:
    config = {g.name: {"name": g.name, "desc": g.description, "ranks": str(list(g.ranks))} for g in dump.groups}
    groups = {group.name: group.description for group in dump.groups}
    entries = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": (call.group, groups[call.group]),
            "collective_seq_id": call.number,
            "p2p_seq_id": 0,
            "op_id": number + 1,
            "profiling_name": f"{call.backend}:{call.operation}",
            "time_created_ns": call.called_at_ns,
            "input_sizes": [list(size) for size in call.input_sizes],
            "output_sizes": [list(size) for size in call.output_sizes],
            "input_dtypes": list(call.dtypes),
            "output_dtypes": list(call.dtypes),
            "state": "completed" if call.is_done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": call.is_done,
            "timeout_ms": 1000,
            "is_p2p": False,
            "frames": [],
        }
        for number, call in enumerate(dump.calls or ())
    ]
    return {
        "rank": rank,
        "version": "2.10",
        "pg_config": config,
        "entries": entries,
        "host_name": "here",
        "nccl_version": "",
    }
