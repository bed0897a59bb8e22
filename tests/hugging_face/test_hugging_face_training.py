"""Training of models of transformers: the same as its own loops, on the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from small_models import BART, BERT, GPT2, LLAMA, T5, VIT, Causal, batch_of, built, causal, masked
from small_runs import largest_difference, make_job, train_alone, train_in_plain_torch
from torch import nn
from verified import judge_all

from scaleray.common.seeding import seed_everything, stream_seed
from scaleray.data import TRAIN
from scaleray.data.transformed import under_transforms
from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.hugging_face import ImageClassification, SequenceClassification, SequenceToSequence, TokenClassification
from scaleray.hugging_face.classifier_losses import Numbers, SeveralClasses
from scaleray.hugging_face.pretrained_models import read_config
from scaleray.hugging_face.token_rows import IGNORED
from scaleray.hugging_face.tokenizers import byte_tokenizer


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
        rows = under_transforms(source).read(plan.samples_at(positions))
        changed = rows if source is under_transforms(source) else source.changed(rows, plan.row_seeds(positions))
        yield workload.collate(changed) if workload.collate else {n: torch.as_tensor(v) for n, v in changed.items()}


def one_sort_of(kind, texts, pictures):
    """A workload of that kind, and what transformers' model is called with for a batch of it."""
    if kind == "images":
        workload = ImageClassification(VIT, data={"train": pictures})
        return workload, lambda batch: {"pixel_values": workload.images.pixels(batch["pixel_values"], torch.float64)}
    as_whole = lambda batch: {name: batch[name].long() for name in batch if name != "labels"}
    if kind == "masked":
        return masked(texts), as_whole
    if kind == "chat":
        return causal(conversations_file(texts), GPT2, sequence_length=64), as_whole
    sort = {"tokenizer": "bytes", "data": {"train": texts}, "sequence_length": 24}
    if kind == "tags":
        return TokenClassification(BERT, **sort), lambda batch: {n: v for n, v in as_whole(batch).items() if n != "starts"}  # fmt: skip
    if kind in ("t5", "bart"):
        answers = SequenceToSequence({"t5": T5, "bart": BART}[kind], target_length=12, **sort)
        return answers, lambda batch: {n: v for n, v in as_whole(batch).items() if n != "is_generated"}
    more = {
        "classes": {},
        "several": {"label": "labels", "problem_type": "multi_label_classification"},
        "number": {"label": "number", "problem_type": "regression"},
        "numbers": {"label": "numbers", "problem_type": "regression"},
    }[kind]
    return SequenceClassification(BERT, **sort, **more), as_whole


def conversations_file(texts):
    path = Path(texts).with_name("chats.jsonl")
    turns = [("user", "shout {}"), ("assistant", "{0}{0}!"), ("user", "and {}"), ("assistant", "{}")]
    path.write_text("".join(json.dumps({"messages": [{"role": who, "content": words.format("ab"[i % 2] * (1 + i % 3))} for who, words in turns]}) + "\n" for i in range(40)))  # fmt: skip
    return str(path)


@pytest.mark.always("chat", "classes", "tags", "t5")
@pytest.mark.parametrize(
    "kind", ["masked", "images", "chat", "classes", "tags", "t5", "bart", "several", "number", "numbers"]
)
def test_training_is_that_of_a_loop_with_transformers_own_loss_on_the_same_rows(texts, pictures, kind):
    workload, inputs = one_sort_of(kind, texts, pictures)
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
        labels = batch["labels"].double() if batch["labels"].is_floating_point() else batch["labels"].long()
        loss = model(**inputs(batch), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert len(losses) == 20
    # of masks and conversations transformers' loss rounds logits to float32, and T5's norms compute in float32
    assert ours.losses == pytest.approx(losses, rel=1e-5 if kind in ("masked", "chat", "t5") else 1e-9)


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


@pytest.mark.combination
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


@pytest.mark.combination
def test_classes_of_texts_are_named_in_the_config_and_learned(texts):
    workload = SequenceClassification(
        BERT, tokenizer="bytes", data={"train": texts}, sequence_length=32, validation_share=0.2
    )
    splits = workload.datasets()
    assert set(splits) == {"train", "val"} and workload.kind.names == ["a", "b"]
    assert workload.config().id2label == {0: "a", 1: "b"}
    run = train_alone(workload, {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "stop.after": "12 epochs", "precision.dtype": "fp32", "evaluation.every": "12 epochs"})  # fmt: skip
    assert run.losses[-1] < 0.5 * run.losses[0]
    with pytest.raises(DataError, match="a label of the train data is b: the classes are a"):
        SequenceClassification(
            BERT, tokenizer="bytes", data={"train": texts}, labels=["a"], sequence_length=32
        ).datasets()


def test_a_masked_model_has_labels_where_tokens_are_hidden_and_learns(texts):
    workload = masked(texts)
    flags = {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "stop.after": "2 epochs", "precision.dtype": "fp32"}  # fmt: skip
    _, sources = make_job(workload, flags)
    rows = sources[TRAIN].read(np.arange(4))
    assert set(rows) == {"input_ids", "labels"} and (rows["labels"] == IGNORED).mean() > 0.7
    run = train_alone(workload, flags)
    assert sum(run.losses[-5:]) < 0.8 * sum(run.losses[:5])


def test_a_vision_model_learns_a_folder_of_images(pictures):
    workload = ImageClassification(VIT, data={"train": pictures}, crop=[0.5, 1.0])
    run = train_alone(workload, {"optimizer.name": "adamw", "optimizer.learning_rate": 1e-2, "stop.after": "8 epochs", "precision.dtype": "fp32"})  # fmt: skip
    assert run.losses[-1] < 0.2 * run.losses[0]
    assert workload.config().id2label == {0: "dark", 1: "light"}


def verdicts(place, *workloads):
    flags = {"activations.checkpointing": "full", "strategy.name": "fsdp"}
    return [o.verdict for workload in workloads for o in judge_all(place, workload, flags, (1, 2), steps=3)]


NUMBERS = {"label": "number", "problem_type": "regression"}


@pytest.mark.parametrize(
    ("kind", "metrics", "answers"),
    [
        ({"label": "labels", "problem_type": "multi_label_classification"}, {"accuracy", "label_accuracy"}, {"labels": (4, 3), "probability": (4, 3)}),
        (NUMBERS, {"mean_absolute_error"}, {"value": (4,)}),
    ],
    ids=["several", "number"],
)  # fmt: skip
def test_several_classes_a_text_and_numbers_are_learned(texts, kind, metrics, answers):
    sort = {"tokenizer": "bytes", "data": {"train": texts}, "sequence_length": 24, "validation_share": 0.2}
    workload = SequenceClassification(BERT, **sort, **kind)
    flags = {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "stop.after": "16 epochs", "precision.dtype": "fp32", "evaluation.every": "16 epochs"}  # fmt: skip
    run = train_alone(workload, flags)
    assert sum(run.losses[-5:]) < 0.5 * sum(run.losses[:5])
    assert run.evaluations[-1].metrics.keys() == {f"val/{name}" for name in ("loss", *metrics)}
    assert workload.config().problem_type == kind["problem_type"]
    found = workload.predict(built(workload), batch_of(workload.datasets()["train"], collate=workload.collate))
    assert {name: tuple(values.shape) for name, values in found.items()} == answers


def test_metrics_of_several_classes_and_numbers_are_those_of_scikit_learn():
    from sklearn.metrics import accuracy_score, hamming_loss, mean_absolute_error, mean_squared_error

    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 3, generator=draw), (torch.rand(40, 3, generator=draw) < 0.4).float()
    found = {n: float(total / count) for n, (total, count) in SeveralClasses("abc").metrics(logits, labels).items()}
    assert found["accuracy"] == pytest.approx(accuracy_score(labels, logits > 0))
    assert found["label_accuracy"] == pytest.approx(1 - hamming_loss(labels, logits > 0))
    found = {n: float(total / count) for n, (total, count) in Numbers(3).metrics(logits, labels).items()}
    assert found["mean_absolute_error"] == pytest.approx(mean_absolute_error(labels, logits))
    assert found["loss"] == pytest.approx(mean_squared_error(labels, logits))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"label": "labels"}, "(?s)each row needs one class.*problem_type: multi_label_classification"),
        ({"label": "number"}, "(?s)each row needs one class.*problem_type: regression"),
        ({"problem_type": "regression"}, "must be a finite number"),
        ({"problem_type": "multi_label_classification"}, "must be a list of classes"),
        ({"problem_type": "ranking"}, "single_label_classification, multi_label_classification, regression"),
        ({**NUMBERS, "labels": ["a"]}, "a regression has no classes"),
    ],
)
def test_labels_of_another_kind_are_refused_with_the_kind_that_they_look_like(texts, args, words):
    with pytest.raises((ConfigError, DataError), match=words):
        SequenceClassification(BERT, tokenizer="bytes", data={"train": texts}, sequence_length=24, **args).datasets()


@pytest.mark.combination
def test_sharded_and_checkpointed_models_train_as_one_process_does(gloo, texts):
    tied = Causal({**GPT2, "vocab_size": 50})  # its head is the embedding
    assert gloo.run(2, verdicts, tied, masked(texts))[0] == ["equal"] * 4


def trained(auto_class, config, folder, names):
    """A folder with a classifier of these classes, in this order."""
    config = {"vocab_size": 261, **config, "id2label": dict(enumerate(names))}
    model = getattr(transformers, auto_class).from_config(read_config(config, {}))
    model.save_pretrained(folder)
    return str(folder)


NAMES = ["b", "a"]
BY_NUMBER = {"tokenizer": "bytes", "sequence_length": 24}


def test_classes_are_in_the_order_of_the_models_own_names(texts, pictures, tmp_path):
    folder = trained("AutoModelForSequenceClassification", BERT, tmp_path / "text", NAMES)
    workload = SequenceClassification(folder, data={"train": texts}, **BY_NUMBER)
    assert workload.kind.names == NAMES and workload.config().id2label == {0: "b", 1: "a"}
    assert workload.datasets()[TRAIN].arrays["labels"][:4].tolist() == [0, 1, 0, 1]
    folder = trained("AutoModelForImageClassification", VIT, tmp_path / "image", ["light", "dark"])
    workload = ImageClassification(folder, data={"train": pictures})
    assert workload.images.classes == ["light", "dark"] and workload.config().id2label == {0: "light", 1: "dark"}
    more = {"model": {**BERT, "id2label": {0: "c", 1: "b", 2: "a"}, "num_labels": 3}}
    assert SequenceClassification(**more, data={"train": texts}, **BY_NUMBER).kind.names == ["c", "b", "a"]


def test_a_trained_classifier_of_other_classes_is_refused_by_their_names(texts, pictures, tmp_path):
    folder = trained("AutoModelForSequenceClassification", BERT, tmp_path / "text", ["B", "A"])
    args = {"model": folder, "data": {"train": texts}, **BY_NUMBER}
    words = r"the train data is a, b: the model was trained for B, A.*\n.*workload\.args\.labels"
    with pytest.raises(DataError, match=words):
        SequenceClassification(**args).datasets()
    several = trained("AutoModelForSequenceClassification", BERT, tmp_path / "several", ["x", "y", "z"])
    more = {"model": several, "label": "labels", "problem_type": "multi_label_classification"}
    with pytest.raises(DataError, match="odd, one, two: the model was trained for x, y, z"):
        SequenceClassification(**{**args, **more}).datasets()
    assert SequenceClassification(**args, labels=["b", "a"]).kind.names == ["b", "a"]
    folder = trained("AutoModelForImageClassification", VIT, tmp_path / "image", ["night", "day"])
    with pytest.raises(DataError, match=r"trained for night, day.*\n.*workload\.args\.classes"):
        ImageClassification(folder, data={"train": pictures}).datasets()


def test_a_tokenizer_without_a_padding_token_fills_rows_with_the_end_of_a_text(texts, tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "tokens")
    args = {"data": {"train": texts}, "sequence_length": 24, "tokenizer": str(tmp_path / "tokens")}
    workload = SequenceClassification(GPT2, **args)
    assert workload.config().pad_token_id == workload.tokenizer.eos_token_id
    assert len(train_alone(workload, {"stop.after": "2 steps", "precision.dtype": "fp32"}).losses) == 2
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "tokens")
    with pytest.raises(WorkloadError, match=r"workload\.args\.tokenizer has neither a padding token.*\n.*pad_token"):
        SequenceClassification(GPT2, **args).datasets()
