"""`python -m jobs.planner_evidence`: tables, JSON, and one message for a slip."""

from __future__ import annotations

import json

import pytest

from jobs.planner_evidence.__main__ import main


def run(capsys, *words):
    code = main(list(words))
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.mark.parametrize(
    ("words", "says"), [(["validate"], "folder"), (["validate", "nowhere"], "nowhere"), (["fit", "nowhere"], "nowhere")]
)
def test_a_slip_is_one_message_and_exit_code_2(capsys, words, says):
    code, _, err = run(capsys, *words)
    assert code == 2 and says in err and "Traceback" not in err


def test_validate_prints_tables_and_what_was_left_out(capsys, tmp_path):
    # torchtitan's benchmark of 64 A100, tokens per second and GPU; the second row is one nobody can predict
    row = {
        "id": "t-0",
        "family": "fsdp_transformer",
        "verified": True,
        "hardware": {"gpu": "A100 80GB", "gpus_per_node": 8, "gpus": 64},
        "model": {
            "name": "Llama 2 13B",
            "layers": 40,
            "hidden": 5120,
            "heads": 40,
            "ffn": 13824,
            "vocab": 32000,
            "seq_len": 4096,
        },
        "parallelism": {
            "strategy": "FSDP2",
            "dp": 64,
            "precision": "bf16",
            "activation_checkpointing": "none",
            "micro_batch": 2,
            "global_batch_seqs": 128,
        },
        "measured": {"tokens_per_s_per_gpu": 2162},
    }
    (tmp_path / "titan.json").write_text(
        json.dumps({"records": [row, {**row, "id": "t-1", "family": "convergence"}], "tables": []})
    )
    code, out, _ = run(capsys, "validate", str(tmp_path))
    assert code == 0 and "by source" in out and "by family" in out and "1 rows not judged" in out and "accuracy" in out
    code, out, _ = run(capsys, "validate", str(tmp_path), "--json")
    assert json.loads(out)["all"][0]["num_rows"] == 1 and len(json.loads(out)["skipped"]) == 1
