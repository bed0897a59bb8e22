"""Intervals: wider the less the question is like what was measured, with the reason in words, and as wide as ever near it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import study_examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_published import EXAMPLES, KORTHIKANTI, TRACE

from jobs.planner_evidence.__main__ import main as judge_planner
from jobs.planner_evidence.published import observations, read_folder
from jobs.planner_evidence.transfers import TRANSFERS, pairs, transfer_scores, transferred
from jobs.planner_evidence.validate import judge
from scaleray.cli.main import run_command
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.planner.cost.layout import Layout
from scaleray.planner.cost.uncertainty import SPREADS, WIDER, Anchor, Reason, interval, is_trusted, reasons

NODE, CLUSTER = parse_cluster("a100-80:8"), parse_cluster("a100-80:8x8,net=200G")
ALONE = Anchor(Layout(micro_batch=4), "a100-80")
PLAN = ["plan", "--model", "gpt2", "--global-batch", "64", "--step-time", "0.1"]


def words_of(layout, *, anchor=ALONE, cluster=NODE, share=0.1):
    return [one.words for one in reasons(anchor, layout, cluster, exposed_share=share)]


def test_near_the_measured_point_there_is_no_reason_and_the_interval_is_as_narrow_as_ever():
    assert words_of(Layout(data=2, micro_batch=4)) == words_of(Layout(data=2, micro_batch=2)) == []
    near = interval(1.0, "anchored")
    assert (math.log(near.low), math.log(near.high)) == pytest.approx((-0.163, 0.236))
    assert is_trusted("anchored") and not is_trusted("unmeasured")
    assert reasons(None, Layout(data=64), CLUSTER, exposed_share=0.9) == ()


@pytest.mark.parametrize(
    ("layout", "given", "says"),
    [
        (Layout(data=8, micro_batch=4), {}, "8 GPUs are 8 times the measured number"),
        (Layout(data=64, micro_batch=4), {"cluster": CLUSTER, "share": 0.3}, "the network 200G was not measured, and 30 % of the step"),
        (Layout(data=2, micro_batch=32), {}, "micro-batches of 32 instead of the measured 4"),
        (Layout(data=2, micro_batch=4, checkpointing="full"), {}, "recompute full instead of none"),
        (Layout(tensor=2, micro_batch=4), {}, "tensor 2 instead of 1"),
        (Layout(data=2, micro_batch=4), {"anchor": Anchor(Layout(micro_batch=4), "t4")}, "measured on t4, not on a100-80"),
    ],
)  # fmt: skip
def test_each_way_to_be_far_from_the_measured_point_is_a_reason_with_its_words(layout, given, says):
    assert any(says in words for words in words_of(layout, **given))


def test_a_network_that_was_measured_is_no_reason():
    layout, there = Layout(data=64, micro_batch=4), Anchor(Layout(data=64, micro_batch=4), "a100-80", "200G")
    assert words_of(layout, anchor=there, cluster=CLUSTER, share=0.9) == []
    assert any("25G" in words for words in words_of(layout, anchor=there, cluster=parse_cluster("a100-80:8x8,net=25G")))


@settings(max_examples=60)
@given(st.integers(0, 6), st.integers(0, 6), st.floats(0, 0.95), st.booleans(), st.sampled_from(["none", "full"]))
def test_intervals_never_narrow_with_distance(doublings, micro_doublings, share, is_other_gpu, checkpointing):
    anchor = Anchor(Layout(), "t4" if is_other_gpu else "a100-80")

    def width(data, micro, waits, kind):
        layout = Layout(data=2**data, micro_batch=2**micro, checkpointing=kind)
        found = reasons(anchor, layout, CLUSTER, exposed_share=waits)
        stated = interval(1.0, "anchored", widened=found)
        assert stated.low <= math.exp(SPREADS["anchored"].low) and stated.high >= math.exp(SPREADS["anchored"].high)
        return math.log(stated.high / stated.low)

    own = width(doublings, micro_doublings, share, checkpointing)
    for other in (
        width(doublings + 1, micro_doublings, share, checkpointing),
        width(doublings, micro_doublings + 1, share, checkpointing),
        width(doublings, micro_doublings, min(1.0, share + 0.05), checkpointing),
        width(doublings, micro_doublings, share, "full"),
    ):
        assert other >= own - 1e-12


def test_reasons_add_as_independent_errors_do_and_doubt_widens_all_of_it():
    spread = SPREADS["anchored"]
    two = interval(2.0, "anchored", widened=[Reason("a", 0.3, 0.4), Reason("b", 0.1, 0.2)])
    assert math.log(two.high / 2) == pytest.approx(math.sqrt(spread.high**2 + 0.16 + 0.04))
    assert math.log(2 / two.low) == pytest.approx(math.sqrt(spread.low**2 + 0.09 + 0.01))
    doubted = interval(2.0, "anchored", widened=[Reason("a", 0.3, 0.4)], doubted=True)
    plain = interval(2.0, "anchored", widened=[Reason("a", 0.3, 0.4)])
    assert math.log(doubted.high / 2) == pytest.approx(WIDER * math.log(plain.high / 2))


# in a plan


def run(capsys, *words):
    code = run_command([*words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.combination
def test_terminal_page_and_json_say_why_an_interval_is_wide(capsys, tmp_path):
    words = [
        *PLAN,
        "--cluster",
        "a100-80:8x2,net=100G",
        "--micro-batch",
        "8",
        "--strategies",
        "fsdp",
        "--html",
        str(tmp_path / "plan.html"),
    ]
    code, out, err = run(capsys, *words, "--json")
    first = json.loads(out)["choices"][0]
    assert code == 0 and first["interval_class"] == "anchored"
    said = [reason["words"] for reason in first["interval_reasons"]]
    assert any("16 times the measured number" in one for one in said) and any("network 100G" in one for one in said)
    page = (tmp_path / "plan.html").read_text()
    for one in said:
        assert f"its interval is wider: {one}" in err and f"Its interval is wider: {one}." in page
    code, out, _ = run(
        capsys, "plan", "--model", "gpt2", "--cluster", "h100:8", "--global-batch", "64", "--strategies", "ddp"
    )
    assert code == 0 and "its interval is wide: nothing was measured" in out


def test_a_run_on_another_kind_of_gpu_is_named_and_widens_the_interval(capsys, tmp_path):
    derived = {"micro_batch_size": 8, "global_batch_size": 8}
    record = study_examples.run_record(step_time_s=0.1, workers=1, strategy="single", derived=derived)

    def first(names):
        environment = {"accelerators": {"names": names}}
        measured = dataclasses.replace(record, environment=environment)
        (tmp_path / "record.json").write_text(json.dumps(dataclasses.asdict(measured)))
        words = [
            "--cluster",
            "a100-80:2",
            "--global-batch",
            "16",
            "--strategies",
            "ddp",
            "--json",
            "--from-run",
            str(tmp_path),
        ]
        return json.loads(run(capsys, "plan", "--model", "gpt2", *words)[1])["choices"][0]

    same, other, old = first(["NVIDIA A100-SXM4-80GB"]), first(["Tesla T4"]), first([])
    assert same["step_time_s"] == old["step_time_s"] and not any(
        "measured on" in one["words"] for one in same["interval_reasons"]
    )
    assert any("measured on t4, not on a100-80" in one["words"] for one in other["interval_reasons"])
    assert other["step_time_s"]["high"] > 1.3 * same["step_time_s"]["high"] and not other["is_trusted"]


@pytest.mark.combination
def test_a_model_of_which_only_the_size_is_known_says_so_everywhere(capsys, tmp_path):
    words = ["plan", "--model", "gpt-350m", "--cluster", "h100:8", "--global-batch", "64", "--strategies", "ddp"]
    code, out, err = run(capsys, *words, "--html", str(tmp_path / "plan.html"), "--json")
    record = json.loads(out)
    said = "only the size of the model is known"
    assert code == 0 and said in err and said in (tmp_path / "plan.html").read_text()
    assert (
        any(said in note for note in record["assumed"])
        and "only the size of the model is known" in record["choices"][0]["doubts"]
    )
    record = json.loads(
        run(capsys, "plan", "--model", "wide-resnet-50-2", "--cluster", "h100:8", "--global-batch", "64", "--json")[1]
    )
    assert any("assumed to be resnet-50" in note for note in record["assumed"])
    record = json.loads(
        run(capsys, "plan", "--model", "resnet-50", "--cluster", "h100:8", "--global-batch", "64", "--json")[1]
    )
    assert record["assumed"] == []


# judged


@pytest.fixture
def folder(tmp_path):
    other = {
        **TRACE,
        "table": "elsewhere",
        "hardware": {"gpu": "Quadro RTX 6000 24GB", "gpus_per_node": 4, "intra_node": "PCIe Gen3"},
        "rows": [["1", 1, 1, 4, 0.2, 0.01], ["1", 1, 1, 8, 0.3, 0.01], ["2", 1, 2, 4, 0.22, 0.03]],
    }
    selective = {
        **KORTHIKANTI,
        "id": "k-1",
        "measured": {"step_time_s": 1.1},
        "parallelism": {**KORTHIKANTI["parallelism"], "activation_checkpointing": "selective"},
    }
    for name, records, tables in (
        ("megatron", [KORTHIKANTI, selective], []),
        ("traces", [], [TRACE, other]),
        ("examples", [], [EXAMPLES]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps({"records": records, "tables": tables}))
    return tmp_path


def test_every_transfer_pairs_rows_that_differ_in_what_it_says(folder):
    found = list(pairs([one for one in observations(read_folder(folder))[0] if one.step_time_s]))
    assert {name for name, _, _ in found} == set(TRANSFERS)
    for name, anchor, asked in found:
        assert anchor is not asked and anchor.model.num_params == asked.model.num_params
        if name == "cluster":
            assert anchor.cluster.gpu.name != asked.cluster.gpu.name
        else:
            assert anchor.series == asked.series and (name != "scale" or asked.num_gpus >= 8 * anchor.num_gpus)
            assert name != "layout" or (anchor.layout.checkpointing, anchor.num_gpus) != (asked.layout.checkpointing, 1)


def test_coverage_counts_the_rows_inside_the_stated_intervals(folder, capsys):
    found = transferred(observations(read_folder(folder))[0])
    for line in transfer_scores(found):
        rows = [one for one in found if one.transfer == line.name]
        inside = [one.is_inside for one in rows]
        assert line.num_rows == len(rows) > 0 and line.inside_share == pytest.approx(sum(inside) / len(rows))
        assert all(one.is_inside or not one.is_near_enough for one in rows), (
            "a wider interval holds what a near one does"
        )
    assert judge_planner(["validate", str(folder), "--transfers", "--json"]) == 0
    assert [line["name"] for line in json.loads(capsys.readouterr().out)["transfers"]] == list(TRANSFERS)


def test_a_series_of_traces_without_a_small_point_is_judged_without_polluxs_model(tmp_path):
    for rows in ([row for row in TRACE["rows"] if row[2] == 8] * 4, [row for row in TRACE["rows"] if row[2] == 1] * 6):
        (tmp_path / "traces.json").write_text(json.dumps({"tables": [{**TRACE, "rows": rows}]}))
        judged = judge(observations(read_folder(tmp_path))[0])
        assert len(judged) == len(rows) >= 12 and all(one.pollux_s is None for one in judged)


def test_judging_uses_the_reasons_between_a_row_and_its_anchor(folder):
    judged = judge(observations(read_folder(folder))[0], with_pollux=False)
    far = [one for one in judged if one.anchored_s and one.seen.num_gpus == 8 and one.seen.is_trace]
    assert far and all(any("8 times" in reason.words for reason in one.reasons) for one in far)
    assert all(one.reasons == () for one in judged if one.anchored_s is None)
