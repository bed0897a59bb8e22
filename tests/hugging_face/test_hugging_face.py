"""Workloads with models of transformers: rows, losses, the same training as transformers' own loop, and folders that it reads.

One file, as importing transformers takes seconds.
"""

from __future__ import annotations

import json
import pickle
import sys

import numpy as np
import pytest
import torch
from small_runs import largest_difference, make_job, train_alone, train_in_plain_torch
from torch import nn
from verified import judge_all

from scaleray.checkpoints.peft_adapter import write_adapter
from scaleray.cli.main import run_command
from scaleray.config.fine_tuning import FineTuningSettings
from scaleray.data import TRAIN
from scaleray.data.row_random import RowRandom
from scaleray.errors import CheckpointError, ConfigError, DataError, WorkloadError
from scaleray.hugging_face import (
    CausalLanguageModel,
    HuggingFaceWorkload,
    ImageClassification,
    MaskedLanguageModel,
    SequenceClassification,
    summed_loss,
)
from scaleray.hugging_face.chat import conversations
from scaleray.hugging_face.masking import Masking
from scaleray.hugging_face.token_rows import IGNORED, Tokens, concatenated, packed, padded
from scaleray.hugging_face.tokenizers import byte_tokenizer
from scaleray.model_blocks import find_blocks
from scaleray.reproducibility.seeding import seed_everything, stream_seed
from scaleray.training.setup import fine_tuning
from scaleray.workload import load_workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BERT = {"model_type": "bert", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip
IDS = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"x = {i} * y{i}\n" * (1 + i % 3), "label": ["b", "a"][i % 2]}) + "\n" for i in range(60)))  # fmt: skip
    return str(path)


def causal(texts, model=LLAMA, **args):
    args = {"tokenizer": "bytes", "sequence_length": 16, **args}
    return CausalLanguageModel(model, data={"train": texts}, **args)


class Causal(HuggingFaceWorkload):
    auto_class, predicts_next = "AutoModelForCausalLM", True

    def datasets(self):
        ids = np.random.default_rng(0).integers(0, 50, (26, 12))
        is_left_out = np.random.default_rng(1).random(ids.shape) < 0.4
        is_left_out[:, 0] = True  # transformers counts it where it is not, although nothing predicts it
        return {TRAIN: {"input_ids": ids, "labels": np.where(is_left_out, IGNORED, ids)}}


def batch_of(source, rows=4):
    return {name: torch.from_numpy(values[:rows]) for name, values in source.arrays.items()}


def built(workload, seed=0):
    torch.manual_seed(seed)
    return workload.build_model().eval()


# rows


def documents(*lengths):
    draw = np.random.default_rng(0)
    return [Tokens(draw.integers(0, 250, n).astype(np.int32)) for n in lengths]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c["model_type"])
def test_packed_documents_are_kept_apart_and_lose_no_token(config):
    workload = Causal({**config, "vocab_size": 261})
    model, found = built(workload), documents(7, 20, 3, 1, 9, 5, 16, 11)
    source = packed(found, 16, pad=0)
    assert source.num_rows == 5  # 72 tokens in rows of 16
    total, count = workload.loss(model, batch_of(source, 99))
    alone, counted = 0.0, 0
    for document in (d.piece(s, s + 16) for d in found for s in range(0, len(d), 16)):
        ids = torch.from_numpy(document.ids)[None].long()
        one, n = summed_loss(model(ids).logits[:, :-1], ids[:, 1:])
        alone, counted = alone + one.item(), counted + int(n)
    assert (int(count), counted) == (72 - 9, 72 - 9)  # the first token of each of nine pieces follows from nothing
    assert total.item() == pytest.approx(alone, rel=1e-5)  # float32


def test_padding_and_concatenation_say_what_is_real():
    found = documents(5, 30)
    columns = padded(found, 8, pad=9).arrays
    assert columns["attention_mask"].sum(axis=1).tolist() == [5, 8]
    assert (columns["labels"] != IGNORED).sum(axis=1).tolist() == [4, 7]
    rows = concatenated(found, 8, what="train").arrays
    assert rows["input_ids"].shape == (4, 8)
    np.testing.assert_array_equal(rows["input_ids"].reshape(-1), np.concatenate([d.ids for d in found])[:32])
    with pytest.raises(DataError, match="a row has 64"):
        concatenated(found, 64, what="train")


CHAT = [
    {"role": "user", "content": "shout it"},
    {"role": "assistant", "content": "IT"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "IT IT"},
]


@pytest.mark.parametrize("template", ["", "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"])  # fmt: skip
def test_a_chat_has_labels_on_the_assistants_words_and_what_ends_them(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    [document] = conversations([CHAT], tokenizer, length=200, what="train")
    end = "[end]" if template else "<eos>"
    said = tokenizer.decode(document.labels[document.labels != IGNORED])
    assert said == f"IT{end}IT IT{end}"
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(document.ids) == text


def test_what_is_no_chat_is_refused(texts):
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match="conversation 1 of the train data"):
        conversations([CHAT, [{"role": "user"}]], tokenizer, length=200, what="train")
    with pytest.raises(DataError, match="without a word of the assistant"), pytest.warns(UserWarning, match="1 of 1"):
        conversations([CHAT], tokenizer, length=4, what="train")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(WorkloadError, match="rewrites earlier turns"):
        conversations([CHAT], tokenizer, length=200, what="train")
    tokenizer.chat_template = None
    with pytest.raises(WorkloadError, match="without a chat template"):
        conversations([CHAT], tokenizer, length=200, what="train")


def test_masks_hide_the_stated_shares_and_never_a_special_token():
    ids = np.random.default_rng(0).integers(0, 100, (400, 64)).astype(np.int32)
    hidden, labels = Masking(0.15, 99, (0, 99), 100).hide(ids, RowRandom(np.arange(400)))
    is_chosen = labels != IGNORED
    assert not is_chosen[np.isin(ids, (0, 99))].any()
    np.testing.assert_array_equal(labels[is_chosen], ids[is_chosen])
    np.testing.assert_array_equal(hidden[~is_chosen], ids[~is_chosen])
    share = is_chosen.sum() / (~np.isin(ids, (0, 99))).sum()
    assert share == pytest.approx(0.15, abs=0.01)  # of 25,000: a standard deviation of 0.0023
    assert (hidden == 99)[is_chosen].mean() == pytest.approx(0.8, abs=0.03)
    assert (hidden == ids)[is_chosen].mean() == pytest.approx(0.1, abs=0.03)
    few = Masking(0.15, 99, (0, 99), 100).hide(ids[7:9], RowRandom(np.arange(7, 9)))
    np.testing.assert_array_equal(few[1], labels[7:9])  # whichever rows are read with them


# models


def test_bytes_are_tokens_that_can_be_read_back():
    tokenizer = byte_tokenizer()
    text = "naïve\t→\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    assert tokenizer("a").input_ids == [tokenizer.cls_token_id, *tokenizer("a", add_special_tokens=False).input_ids, tokenizer.sep_token_id]  # fmt: skip


def test_a_config_takes_vocabulary_and_special_tokens_from_the_tokenizer(texts):
    workload = causal(texts)
    config = workload.config()
    assert (config.vocab_size, config.eos_token_id) == (261, workload.tokenizer.eos_token_id)
    assert causal(texts, {**LLAMA, "vocab_size": 300}).config().vocab_size == 300
    again = pickle.loads(pickle.dumps(workload))  # as it travels to workers, which need no tokenizer
    assert "tokenizers" not in str(again.__dict__) and again.config().vocab_size == 261


@pytest.mark.parametrize(("config", "name"), [(LLAMA, "LlamaDecoderLayer"), (GPT2, "GPT2Block"), (BERT, "BertLayer")])
def test_the_blocks_of_a_model_are_its_layers(config, name):
    model = built(HuggingFaceWorkload({**config, "vocab_size": 50}))
    assert [type(block).__name__ for block in find_blocks(model)] == [name] * 2


def test_blocks_of_other_models_are_what_is_repeated_outermost():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.norm = nn.LayerNorm(2)

    stages = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert find_blocks(stages) == [*stages[1], *stages[2]]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def bad_arguments(folder):
    (folder / "pickled").mkdir()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (folder / "list.json").write_text("[1]")
    (folder / "empty").mkdir()
    return [
        ({"model": str(folder / "nowhere")}, "nothing is fetched from a hub"),
        ({"model": str(folder / "pickled")}, "only safetensors is read"),
        ({"model": str(folder / "list.json")}, "model_type"),
        ({"model": str(folder / "empty")}, "it has no config.json"),
        ({"model": {"hidden_size": 4}}, "model_type of workload.args.model is missing"),
        ({"model": {"model_type": "no_such_model"}}, "transformers .* has no such model"),
        ({"tokenizer": None}, "workload.args.tokenizer is missing"),
        ({"tokenizer": str(folder / "nowhere")}, "there is no such folder or file here"),
        ({"tokenizer": str(folder / "empty")}, "it holds none of tokenizer.json"),
        ({"tokenizer": str(folder / "list.json")}, "it cannot be read"),
        ({"model": {**LLAMA, "vocab_size": 100}}, "one of 261 tokens, but the model knows 100"),
        ({"model": {**LLAMA, "max_position_embeddings": 8}}, "the model has 8 positions"),
        ({"packing": "tight"}, "concatenate, separate, pad"),
        ({"data": {"val": "x"}}, "train among them"),
        ({"data": {"train": str(folder / "nowhere.jsonl")}}, "no such file"),
        ({"text": "body"}, "column body of record 0 of the train data"),
        ({"data": {"train": str(folder / "list.json")}}, "must be a mapping"),
    ]


def started(args):
    workload = load_workload("scaleray.hugging_face:CausalLanguageModel", args)
    workload.datasets()
    workload.build_model()


def test_what_cannot_be_used_is_one_clear_error(texts, tmp_path):
    for changes, words in bad_arguments(tmp_path):
        args = {"model": LLAMA, "tokenizer": "bytes", "data": {"train": texts}, "sequence_length": 16, **changes}
        with pytest.raises((WorkloadError, ConfigError, DataError), match=words):
            started(args)


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(WorkloadError, match=r"pip install 'scaleray\[hugging-face\]'"):
        Causal({**LLAMA, "vocab_size": 50}, peft={"r": 2}).build_model()


def test_labels_of_another_shape_than_the_logits_are_refused():
    with pytest.raises(WorkloadError, match="one label for each place"):
        summed_loss(torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.long))


# training


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda c: c["model_type"])
def test_labels_of_minus_100_count_nothing_and_training_is_that_of_plain_torch(config):
    workload = Causal({**config, "vocab_size": 50})
    flags = {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-2, "stop.after": "20 steps"}
    ours, plain = train_alone(workload, flags), train_in_plain_torch(workload, flags)
    # Llama's norms compute in float32 whatever the model is in: what is rounded there differs by 6e-8 now and then
    bound = 1e-9 if config is GPT2 else 1e-6
    assert ours.losses == pytest.approx(plain.losses, rel=bound)
    assert largest_difference(ours.weights, plain.weights) < 100 * bound


def batches_of(workload, flags):
    """The rows of each step, as training reads them: transformed, each under its own seed."""
    job, sources = make_job(workload, flags)
    plan, source = job.train_plan(), sources[TRAIN]
    for step in range(job.recipe.total_steps):
        positions = plan.positions(step)
        rows = source.source.read(plan.samples_at(positions))
        yield {name: torch.as_tensor(v) for name, v in source.changed(rows, plan.row_seeds(positions)).items()}


@pytest.mark.parametrize("kind", ["masked", "images"])
def test_training_is_that_of_a_loop_with_transformers_own_loss_on_the_same_rows(texts, pictures, kind):
    workload = masked(texts) if kind == "masked" else ImageClassification(VIT, data={"train": pictures})
    flags = {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-3, "stop.after": "20 steps", "optimizer.clip_norm": None}  # fmt: skip
    ours = train_alone(workload, flags)
    seed_everything(stream_seed(0, "model"))
    model = workload.build_model().double()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            assert part.p == 0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.999), 1e-8, 0.0, fused=True)
    losses = []
    for batch in batches_of(workload, flags):
        inputs = {"input_ids": batch["input_ids"].long()} if kind == "masked" else {"pixel_values": workload.images.pixels(batch["pixel_values"], torch.float64)}  # fmt: skip
        loss = model(**inputs, labels=batch["labels"].long()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert ours.losses == pytest.approx(losses, rel=1e-5)  # transformers' loss rounds logits to float32


def in_transformers_loop(workload, steps, batch_size, folder):
    """transformers.Trainer on the very batches of the step plan; gives the mean losses and the weights."""
    import transformers

    job, sources = make_job(workload, {"batch.global_size": batch_size, "stop.after": f"{steps} steps"})
    plan = job.train_plan()
    order = np.concatenate([plan.global_indices(step) for step in range(steps)])
    columns = sources[TRAIN].read(order)

    class Ordered(torch.utils.data.Dataset):
        def __len__(self):
            return len(order)

        def __getitem__(self, i):
            return {name: torch.as_tensor(values[i]).long() for name, values in columns.items()}

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    seed_everything(stream_seed(job.config.seed, "model"))
    model = workload.build_model()
    settings = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=batch_size, max_steps=steps, learning_rate=1e-3, weight_decay=0.0,
        lr_scheduler_type="constant", optim="adamw_torch", max_grad_norm=0.0, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = InOrder(model, settings, train_dataset=Ordered())
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log], model.state_dict()


def test_training_is_that_of_transformers_own_trainer_on_the_same_rows(tmp_path):
    workload = Causal({**GPT2, "vocab_size": 50})
    workload.num_rows = 160
    workload.datasets = lambda: {TRAIN: {n: np.tile(v, (7, 1))[:160] for n, v in Causal.datasets(workload)[TRAIN].items()}}  # fmt: skip
    flags = {
        "batch.global_size": 8,
        "stop.after": "20 steps",
        "precision.dtype": "fp32",
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 1e-3,
        "optimizer.weight_decay": 0.0,
        "optimizer.clip_norm": None,
    }
    losses, weights = in_transformers_loop(workload, 20, 8, tmp_path)
    ours = train_alone(workload, flags)
    assert len(losses) == 20
    assert ours.losses == pytest.approx(losses, rel=2e-5)  # the trainer rounds what it logs
    own = {name: value for name, value in weights.items() if name in ours.weights}
    assert largest_difference(ours.weights, own) < 1e-3  # Adam's first steps turn rounding into parts of the rate


def test_classes_of_texts_are_named_in_the_config_and_learned(texts):
    workload = SequenceClassification(
        BERT, tokenizer="bytes", data={"train": texts}, sequence_length=32, validation_share=0.2
    )
    splits = workload.datasets()
    assert set(splits) == {"train", "val"} and workload.classes == ["a", "b"]
    assert workload.config().id2label == {0: "a", 1: "b"}
    run = train_alone(workload, {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "stop.after": "12 epochs", "precision.dtype": "fp32", "evaluation.every": "12 epochs"})  # fmt: skip
    assert run.losses[-1] < 0.5 * run.losses[0]
    with pytest.raises(DataError, match="a label of the train data is 'b', but the classes are a"):
        SequenceClassification(
            BERT, tokenizer="bytes", data={"train": texts}, labels=["a"], sequence_length=32
        ).datasets()


def masked(texts):
    return MaskedLanguageModel(BERT, tokenizer="bytes", data={"train": texts}, sequence_length=16)


def test_a_masked_model_has_labels_where_tokens_are_hidden_and_learns(texts):
    workload = masked(texts)
    flags = {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "stop.after": "2 epochs", "precision.dtype": "fp32"}  # fmt: skip
    _, sources = make_job(workload, flags)
    rows = sources[TRAIN].read(np.arange(4))
    assert set(rows) == {"input_ids", "labels"} and (rows["labels"] == IGNORED).mean() > 0.7
    run = train_alone(workload, flags)
    assert sum(run.losses[-5:]) < 0.8 * sum(run.losses[:5])


@pytest.fixture
def pictures(tmp_path):
    from PIL import Image

    for number in range(16):
        path = tmp_path / "train" / ["dark", "light"][number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 8), 40 + 160 * (number % 2) + number, np.uint8)).save(path)
    return str(tmp_path / "train")


VIT = {"model_type": "vit", "image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def test_a_vision_model_learns_a_folder_of_images(pictures):
    workload = ImageClassification(VIT, data={"train": pictures}, crop=[0.5, 1.0])
    run = train_alone(workload, {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-2, "stop.after": "8 epochs", "precision.dtype": "fp32"})  # fmt: skip
    assert run.losses[-1] < 0.2 * run.losses[0]
    assert workload.config().id2label == {0: "dark", 1: "light"}


def verdicts(place, *workloads):
    flags = {"activations.checkpointing": "full", "strategy.name": "fsdp"}
    return [o.verdict for workload in workloads for o in judge_all(place, workload, flags, (1, 2), steps=3)]


@pytest.mark.combination
def test_sharded_and_checkpointed_models_train_as_one_process_does(gloo, texts):
    tied = Causal({**GPT2, "vocab_size": 50})  # its head is the embedding
    assert gloo.run(2, verdicts, tied, masked(texts))[0] == ["equal"] * 4


# folders


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
    with pytest.raises(CheckpointError, match="other tensors"):
        workload.export({"x": torch.zeros(1)}, tmp_path / "other")


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
    assert run_command(["checkpoint", "export", run, str(tmp_path / "model")]) == 0
    assert run_command(["checkpoint", "export", run, str(tmp_path / "adapter"), "--adapter"]) == 0
    assert "wrote the adapters of the weights after step 3" in capsys.readouterr().out
    assert run_command(["checkpoint", "export", run, str(tmp_path / "model")]) == 2  # it exists
    assert run_command(["checkpoint", "export", run, str(tmp_path / "x.pt"), "--adapter"]) == 2
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
    with pytest.raises(WorkloadError, match="the model is a gpt2"):
        fine_tuning.load(built(other), other, base)


LORA = FineTuningSettings(lora_rank=4, lora_alpha=8, lora_layers=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    built(Causal({**LLAMA, "vocab_size": 250})).save_pretrained(folder)
    return str(folder)


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
        ({"lora_layers": ("q_proj",)}, "must name these: q_proj, v_proj"),
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
