"""`scaleray plan`: the commands of its help, what they print, and one message for each slip."""

import json
import subprocess
from pathlib import Path

import pytest
import study_examples
import yaml

from scaleray.cli.main import run_command
from scaleray.config import load_config
from scaleray.config.hardware.cluster_text import parse_cluster
from scaleray.errors import ConfigError, StorageError
from scaleray.planner.answers.advise import Advice, predict
from scaleray.planner.answers.plan_question import Question
from scaleray.planner.ask.written_plan import write_config
from scaleray.planner.cost.layout import Layout
from scaleray.planner.models.names import find_model

SMALL = ["--model", "gpt2", "--cluster", "h100:4x2", "--global-batch", "64"]


def run(capsys, *words):
    code = run_command(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_shows_table_memory_time_curve_and_verdict(capsys):
    code, out, _ = run(capsys, *SMALL, "--samples", "1e6")
    assert code == 0
    for words in (
        "MFU",
        "recommended:",
        "memory of one GPU, 79.1 GiB",
        "time of one step",
        "efficiency",
        "hours",
        "next doubling: 16 GPUs",
    ):
        assert words in out


def test_json_holds_the_choices_and_nothing_else(capsys):
    code, out, err = run(capsys, *SMALL, "--json", "--rows", "3")
    record = json.loads(out)
    assert code == 0 and len(record["choices"]) == 3 and "recommended" in err
    first = record["choices"][0]
    assert sum(first["parts_s"].values()) == pytest.approx(first["step_time_s"]["value"])
    assert sum(first["memory_bytes"].values()) == pytest.approx(first["device_bytes"])
    assert first["step_time_s"]["low"] < first["step_time_s"]["value"] < first["step_time_s"]["high"]


def test_a_measured_step_scales_the_plan(capsys):
    def step_s(*words):
        layout = ("--strategies", "ddp", "--json")
        return json.loads(run(capsys, *SMALL, *layout, *words)[1])["choices"][0]

    sheet = step_s()
    slow = step_s("--step-time", "1.0", "--micro-batch", "8")
    assert slow["step_time_s"]["value"] > 2 * sheet["step_time_s"]["value"]
    assert slow["interval_class"] != sheet["interval_class"] == "unmeasured"


def test_a_runs_record_takes_the_place_of_the_measured_step(capsys, tmp_path):
    derived = {"micro_batch_size": 8, "global_batch_size": 8}
    record = study_examples.run_record(step_time_s=1.0, workers=1, strategy="single", derived=derived)
    (tmp_path / "record.json").write_text(record.to_json())
    by_hand = json.loads(run(capsys, *SMALL, "--json", "--step-time", "1.0", "--micro-batch", "8")[1])["choices"][0]
    from_run = json.loads(run(capsys, *SMALL, "--json", "--from-run", str(tmp_path))[1])["choices"][0]
    assert from_run["step_time_s"] == by_hand["step_time_s"]


def test_the_written_config_is_one_that_train_loads(capsys, tmp_path):
    path = tmp_path / "chosen.yaml"
    code, out, _ = run(capsys, *SMALL, "-c", "jobs/digits.yaml", "--strategies", "fsdp", "--write", str(path))
    assert code == 0 and str(path) in out
    config = load_config(path, environ={})
    assert (config.strategy.name, config.scale.workers, config.batch.global_size) == ("fsdp", 8, 64)
    planned = json.loads(run(capsys, *SMALL, "-c", "jobs/digits.yaml", "--strategies", "fsdp", "--json")[1])["choices"][
        0
    ]
    assert config.monitoring.expected_samples_per_s == pytest.approx(planned["samples_per_s"], rel=1e-5)
    assert config.monitoring.flops_per_sample > 0
    assert yaml.safe_load(path.read_text())["workload"] == {"name": "jobs/digits.py:Digits"}


@pytest.mark.parametrize("strategies", ["tp", "pp", "pp,zero1"])
def test_tensor_and_pipeline_layouts_are_written_for_train(capsys, tmp_path, strategies):
    path = tmp_path / "chosen.yaml"
    words = ("--model", "llama-13b", "--cluster", "h100:8", "--global-batch", "16", "--strategies", strategies)
    code, _, err = run(capsys, *words, "-c", "jobs/digits.yaml", "--write", str(path))
    assert code == 0, err
    config = load_config(path, environ={})
    assert config.strategy.name == ("tensor" if strategies == "tp" else "pipeline") and config.scale.workers == 8
    assert list(tmp_path.iterdir()) == [path]


def test_where_train_has_no_strategy_the_best_it_has_is_written_and_the_price_said(tmp_path):
    question = Question(model=find_model("mixtral-8x7b"), cluster=parse_cluster("h100:8"), global_batch=16)
    both = predict(question, Layout(tensor=8, expert=8, accumulation=16))
    one = predict(question, Layout(pipeline=8, accumulation=16, checkpointing="alternate"))
    path = tmp_path / "chosen.yaml"
    lines = write_config(Advice(question=question, choices=[both, one], rejected=[], num_layouts=2), None, path)
    assert yaml.safe_load(path.read_text())["parallel"] == {"pipeline": 8}
    ratio = one.step_time_s.value / both.step_time_s.value
    assert any(f"{ratio:.2f} times as long" in line for line in lines) and any(
        "add workload.name" in line for line in lines
    )
    assert any("selective" in line for line in lines)
    with pytest.raises(ConfigError, match="refuses all 1"):
        write_config(Advice(question=question, choices=[both], rejected=[], num_layouts=1), None, path)
    with pytest.raises(StorageError, match="written"):
        write_config(
            Advice(question=question, choices=[one], rejected=[], num_layouts=1),
            None,
            tmp_path / "no folder" / "chosen.yaml",
        )


def test_a_config_that_train_would_refuse_is_not_left_behind(capsys, tmp_path):
    given = yaml.safe_load(Path("jobs/digits.yaml").read_text()) | {
        "memory": {"find_micro_size": True, "limit_gib": 1.0}
    }
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    words = ("--model", "llama-13b", "--cluster", "h100:8", "--global-batch", "16", "--strategies", "pp")
    code, _, err = run(capsys, *words, "-c", str(tmp_path / "given.yaml"), "--write", str(tmp_path / "chosen.yaml"))
    assert code == 2 and "find_micro_size" in err
    assert [file.name for file in tmp_path.iterdir()] == ["given.yaml"]


@pytest.mark.combination
def test_a_configs_workload_is_counted_once_in_a_process_of_its_own(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ("-c", "jobs/digits.yaml", "--cluster", "h100:8", "--strategies", "ddp", "--json")
    words = (*words, "--tracking.uri", "postgresql://me:secret@db/mlflow")
    commands = []
    run_process = subprocess.run
    monkeypatch.setattr(
        "subprocess.run", lambda command, **more: commands.append(command) or run_process(command, **more)
    )
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert len(commands) == 1 and "secret" not in str(commands)
    first = json.loads(out)
    assert first["global_batch"] == 64 and first["num_params"] > 1000
    kept = list((tmp_path / "scaleray" / "profiles").glob("*.json"))
    assert len(kept) == 1
    monkeypatch.setattr("subprocess.run", lambda *given, **more: pytest.fail("it was counted before"))
    assert json.loads(run(capsys, *words)[1]) == first


def test_a_workload_that_cannot_be_counted_is_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("scaleray.planner.ask.flop_count_cache.sys.executable", "/bin/false")
    code, _, err = run(capsys, "-c", "jobs/digits.yaml", "--cluster", "h100:8")
    assert code == 2 and "--model" in err
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.combination
def test_what_is_recommended_and_written_fits_and_a_faster_layout_that_may_not_is_named_beside_it(capsys, tmp_path):
    words = [
        "--model",
        "llama-3-8b",
        "--cluster",
        "h100:8x16",
        "--global-batch",
        "1024",
        "--strategies",
        "ddp,fsdp,hsdp,tp",
    ]
    files = ["--html", str(tmp_path / "plan.html"), "--write", str(tmp_path / "plan.yaml")]
    code, out, err = run(capsys, *words, *files, "--json")
    record = json.loads(out)
    first, rival = record["choices"][0], record["faster_but_may_not_fit"]
    assert code == 0 and first["fits"] == "fits" and record["surely_fits"] and record["recommended"] == first["words"]
    assert rival["fits"] == "may not fit" and rival["step_time_s"]["value"] < first["step_time_s"]["value"]
    (line,) = [line.strip() for line in err.splitlines() if "faster but may not fit" in line]
    assert rival["words"] in line and f"{100 * rival['gain']:.0f} % faster" in line
    page = (tmp_path / "plan.html").read_text()
    assert line in page
    written = load_config(
        tmp_path / "plan.yaml",
        environ={},
        flags={
            "workload.name": "a:B",
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 0.1,
            "stop.after": "5 steps",
        },
    )
    assert written.batch.micro_size == first["layout"]["micro_batch"]
    # the advice, taken: its options make a config that loads, with the faster layout
    (advice,) = [line for line in err.splitlines() if "to try it" in line]
    options = advice.partition("scaleray train with ")[2].partition(", and ")[0].replace("'5 steps'", "5~steps").split()
    tried = load_config(
        tmp_path / "plan.yaml",
        environ={},
        flags=[word.replace("~", " ") for word in options]
        + ["--workload.name", "a:B", "--optimizer.name", "adamw", "--optimizer.learning-rate", "0.1"],
    )
    assert tried.strategy.name == "fsdp" and tried.batch.micro_size == rival["layout"]["micro_batch"]


@pytest.mark.combination
def test_where_none_surely_fits_terminal_page_and_written_config_say_so(capsys, tmp_path):
    code, out, _ = run(
        capsys,
        "--model",
        "llama-3-8b",
        "--cluster",
        "v100:8x2",
        "--global-batch",
        "64",
        "--html",
        str(tmp_path / "plan.html"),
        "--write",
        str(tmp_path / "plan.yaml"),
    )
    assert code == 0 and "no layout certainly fits" in out and "that scaleray train can run certainly does" in out
    assert "No layout certainly fits" in (tmp_path / "plan.html").read_text()


@pytest.mark.combination
@pytest.mark.filterwarnings("error::UserWarning")  # matplotlib's, where a figure has no room for what it must show
def test_the_page_holds_its_figures_and_loads_nothing(capsys, tmp_path):
    path = tmp_path / "plan.html"
    code, _, _ = run(capsys, *SMALL, "--html", str(path))
    page = path.read_text()
    assert code == 0 and page.startswith("<!doctype html>")
    for words in ("Recommended", "Memory of a GPU", "90% interval", "Next doubling"):
        assert words in page
    assert page.count("<svg") == 4 and ">the card" in page and ">ideal<" in page and ">backward<" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    code, _, err = run(capsys, *SMALL, "--html", str(tmp_path / "nowhere" / "plan.html"))
    assert code == 2 and "cannot be written" in err and "Traceback" not in err


@pytest.mark.parametrize("what", ["constants", "intervals", "h100", "nvlink4", "dgx-h100"])
def test_explain_names_values_and_sources(capsys, what):
    code, out, _ = run(capsys, "explain", what)
    assert code == 0 and len(out.splitlines()) > 4
    if what in ("h100", "nvlink4", "dgx-h100"):
        assert "source: MLE" in out


def test_explain_says_why_layouts_were_dropped(capsys):
    code, out, _ = run(
        capsys,
        "explain",
        "layouts",
        "--model",
        "llama-7b",
        "--cluster",
        "h100:8",
        "--global-batch",
        "64",
        "--rows",
        "5",
    )
    assert code == 0 and out.count("GiB too much") == 5 and "optimizer" in out


def test_here_is_this_machine(capsys):
    code, out, _ = run(capsys, "--model", "resnet-18", "--here", "--global-batch", "64", "--precision", "fp32")
    assert code == 0 and "recommended" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "gpt2", "--global-batch", "8"], "--cluster"),
        (["--cluster", "h100:8", "--global-batch", "8"], "--model"),
        (["--model", "gtp2", "--cluster", "h100:8", "--global-batch", "8"], "gpt2"),
        (["--model", "gpt2", "--cluster", "h1000:8", "--global-batch", "8"], "h100"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "7", "--strategies", "fsdp"], "divide evenly"),
        (["--model", "llama-3-405b", "--cluster", "h100:8", "--global-batch", "8"], "more per GPU"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "8", "--precision", "int2"], "bf16"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "8", "--step-time", "0"], "--micro-batch"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "8", "--hardware", "nowhere.yaml"], "nowhere.yaml"),
        (["--model", "gpt2", "--cluster", "h100:8", "--here", "--global-batch", "8"], "--here"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "8", "--from-run", "nowhere"], "nowhere"),
        (["--model", "gpt2", "--cluster", "h100:8", "--global-batch", "8", "--profile", "nowhere"], "nowhere"),
        (["--batch.global-size", "8"], "-c"),
        (["explain", "philosophy"], "constants"),
    ],
)  # fmt: skip
def test_a_slip_is_one_message_and_exit_code_2(capsys, words, says):
    code, _, err = run(capsys, *words)
    assert code == 2 and says in err and "Traceback" not in err


def test_without_a_batch_a_usual_one_is_assumed_and_said(capsys):
    code, out, _ = run(capsys, "--model", "llama-70b", "--cluster", "a100-80:8x16,net=200G", "--sequence", "4096")
    assert code == 0 and "1024 samples per step, since --global-batch was not given" in out  # 4 million tokens


@pytest.mark.combination
def test_a_plan_is_recorded_where_that_is_asked_for_and_held_against_the_teams_policy(
    capsys, tmp_path, uri, monkeypatch
):
    from scaleray.recording.experiments import read_experiments

    monkeypatch.setenv("SCALERAY_TRACKING__URI", uri)
    monkeypatch.setenv("SCALERAY_TRACKING__OWNER", "anna")
    code, out, _ = run(capsys, *SMALL, "--record")
    assert code == 0 and "MLflow: " in out
    [plan] = read_experiments(uri)
    assert (plan.kind, plan.values["owner"], plan.values["gpus"], plan.values["hardware"]) == (
        "plan",
        "anna",
        8,
        "8 x h100",
    )
    assert plan.values["step_time_s"] > 0 and plan.values["global_batch"] == 64
    (tmp_path / "team.yaml").write_text("invariants:\n  purpose: required\n")
    monkeypatch.setenv("SCALERAY_TRACKING__POLICY", str(tmp_path / "team.yaml"))
    code, out, err = run(capsys, *SMALL)
    assert code == 2 and "team.yaml:2 purpose is required" in err and "recommended" not in out
    monkeypatch.setenv("SCALERAY_TRACKING__PURPOSE", "before we buy")
    assert run(capsys, *SMALL)[0] == 0
    assert [one.values.get("purpose") for one in read_experiments(uri)] == ["before we buy", None]
