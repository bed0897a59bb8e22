"""Folders that `from_pretrained` reads, and adapters of peft, out of a run and into one."""

from __future__ import annotations

import json

import pytest
import torch
from small_models import BERT, GPT2, IDS, LLAMA, Causal, built, causal
from small_runs import train_alone
from torch import nn

from scaleray.checkpoints.peft_adapter import write_adapter
from scaleray.cli.main import run_command
from scaleray.config.averaging_pruning_fine_tuning import FineTuningSettings
from scaleray.errors import CheckpointError, WorkloadError
from scaleray.hugging_face import SequenceClassification
from scaleray.training.setup import fine_tuning


def test_a_runs_export_is_read_by_from_pretrained_and_gives_the_same_logits(texts, tmp_path):
    import transformers

    workload = causal(texts, {**LLAMA, "tie_word_embeddings": True})
    run = train_alone(workload, {"stop.after": "3 steps", "precision.dtype": "fp32"})
    workload.export(run.weights, tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    own = workload.build_model()
    own.load_state_dict(run.weights)
    with torch.no_grad():
        assert torch.equal(model.eval()(IDS).logits, own.eval()(IDS).logits)
    assert model.config.use_cache and model.generation_config.eos_token_id == workload.tokenizer.eos_token_id
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a b").input_ids == workload.tokenizer("a b").input_ids
    # and is a folder to start from: weights, config and tokenizer
    again = causal(texts, str(tmp_path / "out"), tokenizer=None)
    again.datasets()
    with torch.no_grad():
        assert torch.equal(again.build_model().eval()(IDS).logits, own(IDS).logits)
    with pytest.raises(CheckpointError, match="tensors differ from those of"):
        workload.export({"x": torch.zeros(1)}, tmp_path / "other")


@pytest.mark.combination
def test_a_run_is_exported_by_its_name_as_a_folder_and_as_an_adapter(texts, tmp_path, mlflow_database, capsys):
    import peft
    import transformers

    import scaleray

    start = tmp_path / "start"
    built(causal(texts, {**LLAMA, "vocab_size": 261})).save_pretrained(start)
    config = {
        "workload.args": {"model": str(start), "tokenizer": "bytes", "data": {"train": texts}, "sequence_length": 16},
        "workload.name": "scaleray.hugging_face:CausalLanguageModel",
        "batch.global_size": 8,
        "stop.after": "3 steps",
        "optimizer.learning_rate": 1e-1,
        "fine_tuning": {"lora_rank": 2, "lora_layers": ["q_proj"]},
        "checkpoint": {"storage_path": str(tmp_path / "runs"), "every": "3 steps"},
        "tracking": {"uri": f"sqlite:///{mlflow_database}", "system_metrics": False},
    }
    run = scaleray.train(config, local=True).run_dir
    assert run_command(["export", run, "--out", str(tmp_path / "model")]) == 0
    assert run_command(["export", run, "--out", str(tmp_path / "adapter"), "--format", "adapter"]) == 0
    assert "the adapters of the weights after step 3" in " ".join(capsys.readouterr().out.split())
    assert run_command(["export", run, "--out", str(tmp_path / "model")]) == 2  # it exists
    assert run_command(["export", run, "--out", str(tmp_path / "x.pt"), "--format", "adapter"]) == 2
    expected = scaleray.load(run).module
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(start)
    apart = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        logits = expected(IDS).logits
        assert torch.equal(merged(IDS).logits, logits)
        torch.testing.assert_close(apart.eval()(IDS).logits, logits, rtol=1e-4, atol=1e-5)  # one sum instead of two
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model")("ab").input_ids == [259, 64, 65, 260]


def test_weights_of_a_folder_are_read_into_a_config_by_part_and_those_of_another_kind_refused(base):
    workload = Causal(f"{base}/config.json")
    model = built(workload, seed=5)
    fine_tuning.load(model, workload, base)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, built(Causal(base))(IDS).logits)
    other = Causal({**GPT2, "vocab_size": 250})
    with pytest.raises(WorkloadError, match="the model's is gpt2"):
        fine_tuning.load(built(other), other, base)


LORA = FineTuningSettings(lora_rank=4, lora_alpha=8, lora_layers=("q_proj", "v_proj"))


def adapted(base, settings=LORA):
    model = built(Causal(base))
    fine_tuning.adapt(model, settings)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_adapters_go_to_peft_and_come_back_with_the_same_logits(base, tmp_path):
    import peft

    model = adapted(base)
    write_adapter(model.state_dict(), tmp_path / "ours", alpha=8, task="CAUSAL_LM", base=base)
    theirs = peft.PeftModel.from_pretrained(built(Causal(base)), tmp_path / "ours")
    with torch.no_grad():
        expected = theirs(IDS).logits
        torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-5, atol=1e-6)  # a + b + c in another order
        assert not torch.allclose(built(Causal(base))(IDS).logits, expected, atol=1e-2)
    theirs.save_pretrained(tmp_path / "theirs")
    back = built(Causal(base))
    fine_tuning.adapt(back, LORA)
    fine_tuning.load(back, Causal(base), str(tmp_path / "theirs"))
    with torch.no_grad():
        torch.testing.assert_close(back(IDS).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_alpha": 16.0}, "--fine-tuning.lora-rank 4 --fine-tuning.lora-alpha 8"),
        ({"lora_layers": ("q_proj",)}, "must list these: q_proj, v_proj"),
        ({"lora_rank": 2, "lora_alpha": 4.0}, r"\[2, 32\]"),
    ],
)
def test_an_adapter_of_another_model_is_refused(base, tmp_path, changes, words):
    write_adapter(adapted(base).state_dict(), tmp_path, alpha=8)
    model = adapted(base, LORA.model_copy(update=changes))
    with pytest.raises(CheckpointError, match=words):
        fine_tuning.load(model, Causal(base), str(tmp_path))


def test_an_adapter_without_a_place_or_of_another_kind_is_refused(base, tmp_path):
    write_adapter(adapted(base).state_dict(), tmp_path, alpha=8)
    with pytest.raises(CheckpointError, match="the model has none"):
        fine_tuning.load(built(Causal(base)), Causal(base), str(tmp_path))
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**about, "use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora"):
        fine_tuning.load(adapted(base), Causal(base), str(tmp_path))


def test_a_model_wrapped_by_peft_trains_its_adapters_alone_and_is_exported_both_ways(base, tmp_path):
    import peft
    import transformers

    workload = Causal(base, peft={"r": 2, "target_modules": ["q_proj"]})
    start = workload.build_model().state_dict()
    run = train_alone(workload, {"stop.after": "4 steps", "precision.dtype": "fp32", "optimizer.learning_rate": 1.0})
    moved = {name for name, value in run.weights.items() if not torch.equal(value, start[name]) and "lora_A" not in name}  # fmt: skip
    assert moved and all("lora_B" in name for name in moved)
    workload.export(run.weights, tmp_path / "merged")
    workload.export(run.weights, tmp_path / "adapter", adapter=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    apart = peft.PeftModel.from_pretrained(built(Causal(base)), tmp_path / "adapter")
    own = workload.build_model()
    own.load_state_dict(run.weights)
    with torch.no_grad():
        expected = own.eval()(IDS).logits
        torch.testing.assert_close(apart.eval()(IDS).logits, expected, rtol=0, atol=0)
        torch.testing.assert_close(merged.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-5)  # one sum instead of two


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A BERT without a head."""
    import transformers

    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"}, vocab_size=261)).save_pretrained(folder)  # fmt: skip
    return str(folder)


def classifier(texts, encoder, **args):
    return SequenceClassification(encoder, tokenizer="bytes", data={"train": texts}, sequence_length=24, **args)


HEAD_FLAGS = {"stop.after": "4 steps", "precision.dtype": "fp32", "optimizer.learning_rate": 0.1}
OF_HEAD = {"fine_tuning.lora_rank": 2, "fine_tuning.lora_alpha": 4.0, "fine_tuning.lora_layers": ["query"]}


@pytest.mark.filterwarnings("ignore:initialised at random")
def test_a_new_head_trains_with_scalerays_adapters_and_goes_to_peft_and_back(texts, encoder, tmp_path):
    import peft

    workload = classifier(texts, encoder)
    run = train_alone(workload, {**HEAD_FLAGS, **OF_HEAD, "fine_tuning.merge": False})
    settings = FineTuningSettings(lora_rank=2, lora_alpha=4.0, lora_layers=("query",))
    with torch.random.fork_rng():
        own = built(workload)
    start = own.state_dict()
    fixed = {name for name, value in run.weights.items() if name in start and torch.equal(value, start[name])}
    assert start.keys() - fixed == {"classifier.weight", "classifier.bias"}  # drawn under another seed here, too
    fine_tuning.adapt(own, settings)
    assert {n for n, p in own.named_parameters() if p.requires_grad and "lora" not in n} == start.keys() - fixed
    again = train_alone(workload, {**HEAD_FLAGS, **OF_HEAD, "fine_tuning.merge": False, "fine_tuning.trained_whole": []})  # fmt: skip
    assert not torch.equal(again.weights["classifier.weight"], run.weights["classifier.weight"])

    own.load_state_dict(run.weights)
    write_adapter(run.weights, tmp_path / "ours", alpha=4, whole=settings.trained_whole, base=encoder)
    assert json.loads((tmp_path / "ours/adapter_config.json").read_text())["modules_to_save"] == ["classifier"]
    with torch.no_grad():
        expected = own(IDS).logits
        theirs = peft.PeftModel.from_pretrained(built(workload, seed=7), tmp_path / "ours")
        torch.testing.assert_close(theirs.eval()(IDS).logits, expected, rtol=1e-5, atol=1e-6)
        theirs.save_pretrained(tmp_path / "theirs")
        back = built(workload, seed=8)
        fine_tuning.adapt(back, settings)
        fine_tuning.load(back, workload, str(tmp_path / "theirs"))
        torch.testing.assert_close(back(IDS).logits, expected, rtol=0, atol=0)
        # and merged: the folder of a classifier without adapters
        workload.export(fine_tuning.merged(run.weights, settings), tmp_path / "merged")
        merged = built(classifier(texts, str(tmp_path / "merged")))
        torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-5, atol=1e-6)
    without = built(workload)
    fine_tuning.adapt(without, settings.model_copy(update={"trained_whole": ()}))
    with pytest.raises(
        CheckpointError, match=r"classifier\.bias is only in .*\n.*trained_whole must list these: classifier"
    ):
        fine_tuning.load(without, workload, str(tmp_path / "theirs"))


@pytest.mark.filterwarnings("ignore:initialised at random")
@pytest.mark.parametrize(("more", "trains"), [({}, True), ({"task_type": None}, False)])
def test_a_new_head_trains_with_pefts_adapters_unless_another_task_is_stated(texts, encoder, tmp_path, more, trains):
    workload = classifier(texts, encoder, peft={"r": 2, "target_modules": ["query"], **more})
    names = {n for n, p in workload.build_model().named_parameters() if p.requires_grad and "lora" not in n}
    assert bool(names) == trains and all("classifier.modules_to_save" in name for name in names)
    run = train_alone(workload, HEAD_FLAGS)
    own = workload.build_model()
    own.load_state_dict(run.weights)
    workload.export(run.weights, tmp_path / "merged")
    merged = built(classifier(texts, str(tmp_path / "merged")))
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, own.eval()(IDS).logits, rtol=1e-4, atol=1e-5)
