"""Where config values come from, which one wins, and what a wrong one is told."""

import pickle
import re

import pytest
import yaml
from pydantic import ValidationError

from scaleray.config import RunConfig, known_keys, load_config
from scaleray.config.loading import read_flags
from scaleray.errors import ConfigError

TEXT = """\
# a comment on line 1
workload:
  name: jobs/digits.py:Digits
  args: {width: 32, depth: 2}

batch:
  global_size: 64
optimizer:
  learning_rate: 2e-3
stop:
  after: 20 epochs
"""
REQUIRED = {
    "workload.name": "m:W", "batch.global_size": 64, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch",
}  # fmt: skip


@pytest.fixture
def load(tmp_path):
    """Load YAML text as a file called job.yaml."""

    def load(text=TEXT, *, flags=(), environ=None):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return load_config(path, flags=flags, environ=environ or {})

    return load


def refused(load, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return caught.value


def with_flags(**values):
    return load_config(flags={**REQUIRED, **values}, environ={})


# layers


def test_flags_win_over_the_environment_and_the_environment_over_the_file(load):
    environ = {"SCALERAY_BATCH__GLOBAL_SIZE": "128", "SCALERAY_SCALE__WORKERS": "4", "HOME": "/"}
    assert load().batch.global_size == 64
    assert load(environ=environ).batch.global_size == 128
    config = load(environ=environ, flags=["--batch.global-size", "256"])
    assert (config.batch.global_size, config.scale.workers) == (256, 4)
    assert config.optimizer.learning_rate == 2e-3


def test_the_environment_of_the_process_is_read_unless_another_is_given(load, monkeypatch, tmp_path):
    monkeypatch.setenv("SCALERAY_SEED", "7")
    load()  # writes the file
    assert load_config(tmp_path / "job.yaml").seed == 7
    assert load_config(tmp_path / "job.yaml", environ={}).seed == 0


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--scale.workers", "3"], "scale.workers", 3),
        (["--scale.workers=3"], "scale.workers", 3),
        (["--scale.gpus-per-worker", "1"], "scale.gpus_per_worker", 1),
        (["--deterministic"], "deterministic", True),
        (["--deterministic", "--seed", "5"], "deterministic", True),
        (["--deterministic", "false"], "deterministic", False),
        (["--optimizer.betas", "[0.8, 0.99]"], "optimizer.betas", (0.8, 0.99)),
        (["--optimizer.learning-rate", "1e-4"], "optimizer.learning_rate", 1e-4),
        (["--batch.global-size", "1e3"], "batch.global_size", 1000),
        (["--batch.micro-size", "null"], "batch.micro_size", None),
        (["--scale.label_selector", "{zone: eu-1}"], "scale.label_selector", {"zone": "eu-1"}),
        (["--workload.name", "a/b.py:C"], "workload.name", "a/b.py:C"),
        (["--tracking.uri=--odd"], "tracking.uri", "--odd"),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_flags_set_values(load, words, key, value):
    assert get(load(flags=words), key) == value


def get(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(
    ("flags", "environ"),
    [
        (["--workload.args.width", "64"], {}),
        ({"workload.args.width": 64}, {}),
        ((), {"SCALERAY_WORKLOAD__ARGS__WIDTH": "64"}),
        (["--workload.args.width", "64"], {"SCALERAY_WORKLOAD__ARGS__WIDTH": "48"}),
    ],
)
def test_one_argument_of_the_workload_can_be_replaced_and_the_others_stay(load, flags, environ):
    assert load(flags=flags, environ=environ).workload.args == {"width": 64, "depth": 2}


def test_all_arguments_of_the_workload_can_be_replaced_at_once(load):
    assert load(flags=["--workload.args", "{a: 1}", "--workload.args.b", "2"]).workload.args == {"a": 1, "b": 2}


def test_arguments_that_are_no_mapping_are_refused_even_below_a_flag(load):
    error = refused(load, TEXT.replace("{width: 32, depth: 2}", "[1]"), flags=["--workload.args.b", "2"])
    assert "job.yaml:4 workload.args" in str(error)


@pytest.mark.parametrize("words", [["scale.workers", "2"], ["--"], ["--seed", "1", "2"], ["-x"]])
def test_a_word_that_is_no_option_is_refused(load, words):
    assert "options have the form --scale.workers 2" in str(refused(load, flags=words))


def test_a_mapping_may_hold_sections_as_a_file_does():
    nested = {"batch": {"global_size": 64}, "optimizer": {"learning_rate": 0.1}, "scale.label_selector": {"zone": "a"}}
    config = load_config(flags={"workload.name": "m:W", "stop.after": "1 epoch", **nested}, environ={})
    assert config.batch.global_size == 64 and config.scale.label_selector == {"zone": "a"}


def test_a_mapping_of_dotted_keys_is_as_good_as_a_file():
    assert isinstance(load_config(flags=REQUIRED, environ={}), RunConfig)


# unknown keys, duplicates, empty sections


@pytest.mark.parametrize(
    ("line", "unknown", "near"),
    [
        ("batch: {global_sise: 64}", "batch.global_sise", "batch.global_size"),
        ("bach: {global_size: 64}", "bach", "batch"),
        ("optimizer: {lr: 1, learning_rat: 0.1}", "optimizer.lr", None),
        ("optimiser: {learning_rate: 0.1}", "optimiser", "optimizer"),
        ("scale: {worker: 2}", "scale.worker", "scale.workers"),
        ("workers: 2", "workers", "scale.workers"),
        ("deterministc: true", "deterministc", "deterministic"),
    ],
)
def test_an_unknown_key_is_named_with_file_and_line_and_the_nearest_known_one(load, line, unknown, near):
    message = str(refused(load, TEXT.replace("\nbatch:\n  global_size: 64\n", f"\n{line}\n") if near else f"{line}\n"))
    assert f":{6 if near else 1} {unknown}" in message and "job.yaml" in message
    if near:
        assert f"did you mean {near}" in message


@pytest.mark.parametrize(
    "kwargs",
    [
        {"flags": ["--optimizer.clip-norm", "None"]},
        {"flags": ["--optimizer.clip-norm=None"]},
        {"flags": ["--optimizer.clip-norm", "null"]},
        {"flags": {"optimizer.clip_norm": "None"}},
        {"environ": {"SCALERAY_OPTIMIZER__CLIP_NORM": "None"}},
    ],
)
def test_none_is_taken_in_the_words_of_the_pages(load, kwargs):
    assert load(TEXT, **kwargs).optimizer.clip_norm is None


def test_none_is_a_word_like_others_for_a_key_that_always_has_a_value(load):
    assert load(TEXT, flags=["--tracking.experiment", "None"]).tracking.experiment == "None"
    with pytest.raises(ConfigError, match=r"batch\.global_size is 'None'"):
        load(TEXT, flags=["--batch.global-size", "None"])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"flags": ["--scale.worker", "2"]}, ("flag scale.worker", "did you mean scale.workers?")),
        ({"flags": ["--lr", "2"]}, ("flag lr", "did you mean optimizer.learning_rate?")),
        ({"flags": ["--optimizer.LR", "2"]}, ("flag optimizer.LR", "did you mean optimizer.learning_rate?")),
        ({"flags": ["--epochs", "2"]}, ("flag epochs", "did you mean stop.after (with its unit")),
        ({"flags": ["--data.num-workers", "2"]}, ("data.num_workers", "scale.workers", "data.readers")),
        ({"flags": ["--batch.size", "2"]}, ("flag batch.size", "did you mean batch.global_size (samples")),
        ({"flags": ["--checkpoint.dir", "x"]}, ("flag checkpoint.dir", "did you mean checkpoint.storage_path?")),
        ({"flags": ["--checkpoint.path", "x"]}, ("checkpoint.path", "did you mean checkpoint.storage_path?")),
        ({"flags": ["--evaluation.batch-size", "2"]}, ("batch_size", "did you mean evaluation.micro_size?")),
        ({"flags": ["--learning-rate", "2"]}, ("flag learning_rate", "did you mean optimizer.learning_rate?")),
        ({"flags": ["--qqq", "2"]}, ("flag qqq", "sections are activations, alerts, averaging, batch")),
        ({"flags": ["--batch", "2"]}, ("flag batch", "a section with keys such as batch.global_size")),
        ({"environ": {"SCALERAY_SCALE_WORKERS": "2"}}, ("SCALERAY_SCALE_WORKERS", "did you mean scale.workers?")),
        ({"flags": {"batch": {"globl_size": 3}}}, ("override batch.globl_size", "did you mean batch.global_size?")),
    ],
)
def test_an_unknown_key_from_elsewhere_says_where_it_was_given(load, kwargs, words):
    message = str(refused(load, **kwargs))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "where"),
    [(TEXT + "seed: 1\nseed: 2\n", "job.yaml:13 seed"), (TEXT.replace("64", "64\n  global_size: 32"), "job.yaml:8 batch.global_size"), (TEXT + "batch: {}\n", "job.yaml:12 batch")],
)  # fmt: skip
def test_a_key_given_twice_is_refused_at_the_second_place(load, text, where):
    message = str(refused(load, text))
    assert where in message and "given twice" in message


def test_an_empty_section_has_its_defaults(load):
    assert load(TEXT + "scale:\ndata: {}\n").scale.workers == 1


@pytest.mark.parametrize("content", ["5", "[1, 2]", "word"])
def test_a_section_that_is_no_mapping_names_a_key_it_could_hold(load, content):
    message = str(refused(load, TEXT + f"scale: {content}\n"))
    assert "job.yaml:12 scale" in message and "scale.workers" in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_says_what_it_needs(load, text):
    message = str(refused(load, text))
    assert "job.yaml" in message and "workload, batch, optimizer and stop" in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "word\n", "5\n"])
def test_a_file_without_sections_is_refused(load, text):
    assert "not a mapping" in str(refused(load, text))


def test_broken_yaml_names_file_and_line(load):
    assert "job.yaml:13" in str(refused(load, TEXT + "scale: {\n"))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00batch")
    assert "cannot be read" in str(refused(load_config, path, environ={}))


def test_a_missing_file_names_the_yaml_files_beside_it(tmp_path):
    (tmp_path / "job.yml").write_text(TEXT)
    message = str(refused(load_config, tmp_path / "jop.yml", environ={}))
    assert "does not exist" in message and "job.yml" in message


# wrong values


@pytest.mark.parametrize("key", list(known_keys()))
def test_a_wrong_value_of_any_key_names_the_key_and_where_it_stands(load, key):
    message = str(refused(load_config, flags={**REQUIRED, key: object()}, environ={}))
    assert message.startswith(f"override {key} is ")
    assert re.search(": (it must be|a number and one of .* are needed|a metric, .* are needed)", message)


@pytest.mark.parametrize("key", [key for key in REQUIRED if key != "optimizer.learning_rate"])
def test_a_missing_required_key_is_named(key):
    given = {k: v for k, v in REQUIRED.items() if k != key}
    message = str(refused(load_config, flags=given, environ={}))
    assert message.startswith(f"{key} is required.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch.global_size", 0), ("batch.global_size", 1.5), ("batch.global_size", "many"), ("batch.global_size", True),
        ("batch.global_size", 2**41), ("batch.micro_size", 0), ("batch.unit", "bytes"), ("optimizer.learning_rate", 0),
        ("optimizer.learning_rate", float("nan")), ("optimizer.learning_rate", "1e999"), ("optimizer.betas", [0.9]),
        ("optimizer.betas", [0.9, 1.0]), ("optimizer.betas", [-0.1, 0.9]), ("optimizer.betas", [False, 0.9]), ("optimizer.momentum", 1),
        ("optimizer.clip_norm", 0), ("optimizer.rule", "cubic"), ("schedule.final_ratio", 1.1), ("schedule.warmup", "3 weeks"),
        ("schedule.warmup", 3), ("stop.after", "0 steps"), ("stop.after", "-1 epochs"), ("evaluation.every", "0 epochs"), ("schedule.length", "0 steps"), ("stop.at", "val/accuracy"), ("stop.at", "accuracy >= 1"),
        ("scale.workers", 0), ("scale.gpus_per_worker", 2), ("scale.cpus_per_worker", 0), ("scale.label_selector", {"zone": 1}),
        ("precision.dtype", "int8"), ("data.timeout_s", -1), ("tracking.run_name", "../up"), ("tracking.run_name", ""),
        ("tracking.experiment", ""), ("seed", -1), ("seed", 2**63), ("seed", False), ("deterministic", "perhaps"), ("on_nonfinite", "ignore"),
        ("workload.name", ""), ("workload.args", {"when": b"now"}), ("workload.args", {"x": {1: 2}}), ("workload.args", [1]),
        ("workload.args", {"x": 2**70}),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_by_name(key, value):
    message = str(refused(load_config, flags={**REQUIRED, key: value}, environ={}))
    assert message.startswith(f"override {key} is ")


def test_a_value_in_a_file_is_refused_with_its_line(load):
    message = str(refused(load, TEXT.replace("2e-3", "fast")))
    assert "job.yaml:9 optimizer.learning_rate is fast" in message


def test_a_value_from_the_environment_is_refused_with_the_variable(load):
    message = str(refused(load, environ={"SCALERAY_SCALE__WORKERS": "two"}))
    assert "environment variable SCALERAY_SCALE__WORKERS scale.workers is two" in message


def test_a_target_needs_evaluations_to_look_at():
    message = str(refused(load_config, flags={**REQUIRED, "stop.at": "val/accuracy >= 0.9"}, environ={}))
    assert "stop.at" in message and "evaluation.every" in message
    assert with_flags(**{"stop.at": "val/accuracy >= 0.9", "evaluation.every": "1 epoch"}).stop.at.value == 0.9


def test_errors_survive_pickling_and_know_their_key(load):
    error = refused(load, TEXT.replace("64", "0"))
    assert error.key == "batch.global_size"
    assert error.exit_code == 2
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.key) == (str(error), error.key)


# what comes out


def test_a_config_is_frozen():
    with pytest.raises(ValidationError):
        with_flags().seed = 3


def test_a_saved_config_loads_as_the_same_run(load, tmp_path):
    config = load(
        flags=["--schedule.warmup", "0.1234567 epochs", "--optimizer.betas", "[0.8, 0.99]", "--scale.workers", "2"]
    )
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(tmp_path / "saved.yaml", environ={}) == config


CHANGES = {
    "workload.name": "m:V", "workload.args": {"width": 3}, "batch.global_size": 32, "batch.unit": "tokens", "batch.micro_size": 2,
    "batch.drop_last": True, "optimizer.name": "sgd", "optimizer.learning_rate": 0.2, "optimizer.reference_batch_size": 8,
    "optimizer.rule": "sqrt", "optimizer.betas": [0.8, 0.9], "optimizer.epsilon": 1e-6, "optimizer.weight_decay": 0.1,
    "optimizer.momentum": 0.8, "optimizer.nesterov": True, "optimizer.clip_norm": 1.0, "stop.after": "2 epochs",
    "schedule.name": "linear", "schedule.warmup": "2 steps", "schedule.length": "3 steps", "schedule.final_ratio": 0.5,
    "schedule.factor": 0.5, "schedule.patience": 2, "schedule.threshold": 0.1, "schedule.cooldown": 1, "schedule.watch": "val/loss min",
    "evaluation.test": "at_end", "evaluation.every": "1 steps", "evaluation.micro_size": 2, "scale.workers": 2, "scale.gpus_per_worker": 1, "scale.cpus_per_worker": 2,
    "scale.placement": "SPREAD", "scale.label_selector": {"a": "b"}, "scale.max_failures": 1, "scale.launch_timeout_s": 5, "scale.wait_for_nodes_s": 5,
    "recovery.spares": 1, "recovery.silent_s": 2,
    "scale.collective_timeout_s": 5, "scale.dashboard": True, "strategy.name": "ddp", "strategy.bucket_size_mib": 1, "strategy.gradient_as_bucket_view": False,
    "strategy.static_graph": True, "strategy.find_unused_parameters": True, "precision.dtype": "bf16", "precision.initial_loss_scale": 2,
    "data.readers": "ray", "data.shuffle": False, "data.bucket_by_length": 3, "data.window_rows": 3, "data.chunk_mib": 1, "data.prefetch_mib": 1, "data.reserved_cpus": 0, "data.timeout_s": 1,
    "checkpoint.storage_path": "x", "checkpoint.save_final": False, "tracking.uri": "sqlite:///x", "tracking.experiment": "x",
    "tracking.run_name": "x", "tracking.every_steps": 1, "tracking.interval_s": 1, "tracking.system_metrics": False, "tracking.owner": "x", "tracking.purpose": "x", "tracking.policy": "x",
    "tracking.policy_reason": "x", "study.price_per_worker_hour": 2.0,
    "study.currency": "EUR", "study.peak_tflops": 1.0, "seed": 1,
    "deterministic": True, "on_nonfinite": "skip", "workload.weights": "x", "scale.on_resize": "rescale", "scale.resize_interval_s": 1,
    "checkpoint.every": "5 steps", "checkpoint.every_minutes": 1, "checkpoint.is_asynchronous": False, "checkpoint.keep_last": 3,
    "checkpoint.keep_best": 3, "checkpoint.best": "val/loss min", "checkpoint.keep_every": "9 steps", "checkpoint.full_every": 1,
    "checkpoint.grace_s": 1, "checkpoint.memory": {"copies": 3}, "recovery.on_loss": "shrink",
    "optimizer.trust_coefficient": 0.1, "optimizer.adapt_vectors": True,
    "pruning.method": "magnitude", "pruning.sparsity": 0.7, "pruning.start_step": 3, "pruning.end_step": 50, "pruning.every_steps": 7,
    "pruning.exclude": ["head"], "fine_tuning.lora_rank": 4, "fine_tuning.lora_alpha": 8.0, "fine_tuning.lora_layers": ["output"],
    "fine_tuning.trained_whole": ["head"], "fine_tuning.freeze": ["embedding"], "fine_tuning.merge": False,
    "fsdp.reshard_after_forward": False, "parallel.replicate": 2, "fsdp.wrap": "size", "fsdp.wrap_min_parameters": 9,
    "fsdp.prefetch": 2, "fsdp.max_unsharded_gib": 1, "fsdp.accumulate": "sharded",
    "fsdp.reduce_unused": True, "fsdp.cpu_offload": True, "fsdp.parameter_dtype": "bf16", "fsdp.reduce_dtype": "fp32",
    "fsdp.build_gib": 1, "parallel.tensor": 4, "parallel.context": 2, "parallel.expert": 2, "context.exchange": "ring", "tensor.sequence_parallel": False, "parallel.pipeline": 4, "pipeline.schedule": "gpipe",
    "pipeline.split": "measured", "parallel.shard": "auto", "local_sgd.sync_every": 2,
    "local_sgd.warmup_steps": 2, "local_sgd.node_sync_every": 2, "local_sgd.average_momentum": False,
    "local_sgd.outer_learning_rate": 1, "local_sgd.outer_momentum": 0.5, "local_sgd.fragments": 2, "local_sgd.overlap": 1, "local_sgd.mixing": 0.5, "gossip.graph": "ring", "gossip.is_asynchronous": True,
    "gossip.max_staleness": 1, "gossip.meet_every": 5, "compression.name": "int8",
    "averaging.decay": 0.99, "averaging.every": 3, "stop.watch": "val/loss min",
    "shares.by": "speed", "shares.measure_every": 5, "shares.smallest": 0.5,
    "precision.tf32": True, "precision.float8_leave_out": ["head"], "precision.emulate_float8": True, "activations.checkpointing": "full", "activations.every": 3, "activations.memory_budget": 0.7,
    "compilation.what": "model", "compilation.backend": "eager", "compilation.dynamic": True, "compilation.mode": "max-autotune",
    "compilation.cache_dir": "x", "compilation.must_succeed": True, "memory.limit_gib": 1,
    "noise_scale.measure": "auto", "noise_scale.every_steps": 3, "noise_scale.averaging": 0.9, "noise_scale.preconditioned": True,
    "alerts.watch": False, "alerts.without": ["loss_spike"], "alerts.webhook": "http://x/y", "alerts.grafana": "http://x", "alerts.command": ["x"], "alerts.timeout_s": 1,
    "alerts.attempts": 2, "alerts.least": "critical", "alerts.action": {"critical": "stop"}, "alerts.no_progress_s": 1,
    "alerts.no_progress_steps": 2, "alerts.long_phase_s": 60, "alerts.straggler_share": 0.2, "alerts.link_ratio": 0.5, "alerts.pair_ratio": 0.4, "alerts.measures_links": False, "alerts.throughput_ratio": 0.5,
    "alerts.predicted_ratio": 0.5, "alerts.input_wait_share": 0.5, "alerts.loss_spike_mads": 9, "alerts.gradient_factor": 9,
    "alerts.loss_scale_drop": 9, "alerts.memory_share": 0.5, "alerts.memory_creep_gib": 2, "alerts.memory_full_within_s": 60, "alerts.disk_free_share": 0.5,
    "alerts.checkpoint_intervals": 3, "alerts.restarts_an_hour": 9, "alerts.gpu_busy_share": 0.1, "alerts.gpu_throttled_share": 0.5,
    "memory.reserve": 0.1, "memory.on_out_of_memory": "halve",
    "monitoring.port": 0, "monitoring.every_s": 1, "monitoring.expected_samples_per_s": 9.0, "monitoring.flops_per_sample": 9.0,
}  # fmt: skip
ONLY_WITH = {
    "compression.start_step": ({"compression.name": "bf16"}, 3), "compression.rank": ({"compression.name": "powersgd"}, 2),
    "compression.density": ({"compression.name": "topk"}, 0.5), "compression.block_size": ({"compression.name": "int8"}, 64),
    "compression.max_error": ({"compression.name": "adaptive"}, 0.3), "compression.allowed": ({"compression.name": "adaptive"}, ["int8"]),
    "compression.review_every": ({"compression.name": "adaptive"}, 7), "fsdp.wrap_classes": ({}, ["Block"]),
    "local_sgd.node_size": ({"local_sgd.node_sync_every": 2}, 2), "shares.speeds": ({}, [1, 2]),
    "precision.float8": ({"precision.dtype": "bf16"}, "tensorwise"), "memory.find_micro_size": ({"memory.limit_gib": 1}, True),
    "pipeline.stages_per_worker": ({"pipeline.schedule": "interleaved_1f1b"}, 3),
}  # fmt: skip
"""Keys that only some values of others allow, with those."""
TOGETHER = {"fsdp.wrap_classes": {"fsdp.wrap": "class"}, "shares.speeds": {"shares.by": "given"}}


def test_one_value_of_a_key_with_several_keeps_the_others():
    given = {"checkpoint.memory": {"copies": 3}}
    found = load_config(flags={**REQUIRED, **given, "checkpoint.memory.place": "rack"}, environ={}).checkpoint.memory
    assert (found.copies, found.place, str(found.every)) == (3, "rack", "1 step")
    assert load_config(flags=REQUIRED, environ={}).checkpoint.memory is None
    stored = {"checkpoint": {"memory": found.model_dump(mode="json")}}
    assert load_config(flags={**REQUIRED, **stored}, environ={}).checkpoint.memory == found
    with pytest.raises(ConfigError, match="evry"):
        load_config(flags={**REQUIRED, "checkpoint.memory.evry": "1 step"}, environ={})


def test_the_hash_changes_with_everything_but_where_a_run_is_kept_and_what_it_measures():
    assert {
        *CHANGES,
        *ONLY_WITH,
        "stop.at",
        "stop.patience",
        "checkpoint.copies",
        "checkpoint.copy_path",
        "alerts.webhook_env",
    } == set(known_keys()), "a new key belongs into CHANGES"
    plain = with_flags().hash()
    assert len(plain) == 16 and plain == with_flags().hash()
    for key, value in CHANGES.items():
        is_storage = key.startswith(
            ("tracking.", "checkpoint.", "noise_scale.", "study.", "alerts.", "monitoring.", "recovery.")
        )
        assert (with_flags(**{key: value}).hash() == plain) == is_storage, key
    for key, (others, value) in ONLY_WITH.items():
        given = {key: value, **TOGETHER.get(key, {})}
        assert with_flags(**others, **given).hash() != with_flags(**others).hash(), key
    evaluated = {"evaluation.every": "1 epoch"}
    assert with_flags(**evaluated).hash() != with_flags(**evaluated, **{"stop.at": "val/loss <= 1"}).hash()
    watched = {**evaluated, "stop.watch": "val/loss min"}
    assert with_flags(**watched).hash() != with_flags(**watched, **{"stop.patience": 2}).hash()


def test_read_flags_keeps_the_words_as_yaml_reads_them():
    entries = read_flags(["--a", "1", "--b", "1.5", "--c", "text with: colon", "--d", "", "--e=[1, x]"])
    assert {key: entry.value for key, entry in entries.items()} == {
        "a": 1,
        "b": 1.5,
        "c": {"text with": "colon"},
        "d": None,
        "e": [1, "x"],
    }
