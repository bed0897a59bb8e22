"""Rows of unequal length, tags of words, and texts that answer texts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import BART, BERT, T5, HuggingFaceWorkload, batch_of, built
from small_runs import largest_difference, relative_differences, train, train_alone

from scaleray.data import TRAIN, Ragged
from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.hugging_face import SequenceToSequence, TokenClassification
from scaleray.hugging_face.token_classification import entity_metrics, tag_metrics
from scaleray.hugging_face.token_rows import IGNORED

FLAGS = {"optimizer.name": "adamw", "optimizer.learning_rate": 3e-3, "batch.micro_size": 2, "evaluation.every": "4 steps", "stop.after": "8 steps"}  # fmt: skip


class Own(HuggingFaceWorkload):
    """A user's workload with rows of 3 to 9 tokens, and nothing about masks. padded: whether they are filled up."""

    auto_class = "AutoModelForTokenClassification"

    def __init__(self, padded=False):
        super().__init__({**BERT, "vocab_size": 50, "num_labels": 3})
        self.padded = padded

    def datasets(self):
        draw = np.random.default_rng(0)
        rows = [draw.integers(1, 50, 3 + n % 7) for n in range(26)]
        if not self.padded:
            return {TRAIN: {"input_ids": rows, "labels": [row % 3 for row in rows]}}
        full = lambda values, fill: np.array([[*row, *[fill] * (9 - len(row))] for row in values])
        return {TRAIN: {"input_ids": full(rows, 0), "labels": full([row % 3 for row in rows], IGNORED), "attention_mask": full([row > 0 for row in rows], 0)}}  # fmt: skip


def test_rows_of_unequal_length_need_no_word_about_masks():
    flags = {"optimizer.learning_rate": 0.05, "stop.after": "6 steps", "batch.micro_size": 2}
    ragged, padded = train_alone(Own(), flags), train_alone(Own(padded=True), flags)
    assert ragged.losses == pytest.approx(padded.losses, rel=1e-9)
    assert largest_difference(ragged.weights, padded.weights) < 1e-9
    bucketed = train_alone(Own(), {**flags, "data.bucket_by_length": 2})
    assert bucketed.losses != pytest.approx(ragged.losses, rel=1e-3)


def test_without_labels_padding_counts_nothing():
    batch = Own().collate({"input_ids": Ragged.of([np.array([4, 5, 6]), np.array([7])])})
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert Own().labels(batch).tolist() == [[4, 5, 6], [7, IGNORED, IGNORED]]


def tagger(texts, **args):
    return TokenClassification(BERT, tokenizer="bytes", data={"train": texts}, sequence_length=32, validation_share=0.3, **args)  # fmt: skip


def seq2seq(texts, model=T5, **args):
    args = {"target_length": 12, "sequence_length": 24, "validation_share": 0.3, **args}
    return SequenceToSequence(model, tokenizer="bytes", data={"train": texts}, **args)


def on_a_worker(place, workload, flags):
    return train(place, workload, flags)


@pytest.mark.always("tags-ddp", "answers-ddp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["tags", "answers"])
def test_two_workers_train_and_measure_what_one_does(gloo, texts, kind, strategy):
    workload = tagger(texts) if kind == "tags" else seq2seq(texts, BART, generated_rows=7, rouge=True)
    flags = {**FLAGS, "optimizer.name": "sgd", "optimizer.learning_rate": 0.05}
    alone = train_alone(workload, flags)
    both = gloo.run(2, on_a_worker, workload, {**flags, "strategy.name": strategy})[0]
    assert max(relative_differences(alone.losses, both.losses)) < 1e-9
    assert largest_difference(alone.weights, both.weights) < 1e-9
    names = {"tags": {"precision", "recall", "f1"}, "answers": {"exact_match", "rouge1", "rouge2", "rougeL"}}[kind]
    assert alone.evaluations[-1].metrics.keys() <= {f"val/{name}" for name in {"loss", "accuracy", *names}}
    assert [e.metrics for e in both.evaluations] == [pytest.approx(e.metrics, rel=1e-9) for e in alone.evaluations]


def test_the_first_token_of_a_word_has_its_tag(texts):
    workload = tagger(texts)
    arrays = workload.datasets()[TRAIN].arrays
    tokens = [workload.tokenizer.decode([i]) for i in arrays["input_ids"][0]]
    named = [(token, workload.names[n]) for token, n in zip(tokens, arrays["labels"][0], strict=True) if n != IGNORED]
    record = json.loads(Path(texts).read_text().splitlines()[0])
    assert [tag for _, tag in named] == record["tags"] and [t for t, _ in named] == [w[0] for w in record["words"]]
    assert (arrays["starts"].values == (arrays["labels"].values != IGNORED)).all()
    model = built(workload)
    batch = batch_of(workload.datasets()[TRAIN], collate=workload.collate)
    answers = workload.predict(model, {name: column for name, column in batch.items() if name != "labels"})
    assert [len(tags.split()) for tags in answers["tags"]] == (batch["starts"] > 0).sum(dim=1).tolist()


def test_a_tagger_learns_and_its_export_names_the_tags(texts, tmp_path):
    import transformers

    workload = tagger(texts)
    flags = {**FLAGS, "stop.after": "10 epochs", "evaluation.every": "10 epochs", "precision.dtype": "fp32"}
    run = train_alone(workload, flags)
    assert run.evaluations[-1].metrics["val/f1"] > 0.95
    workload.export(run.weights, tmp_path / "out")
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
    assert list(model.config.id2label.values()) == ["B-NUM", "B-VAR", "O"]
    by_number = tmp_path / "by_number.jsonl"
    by_number.write_text('{"words": ["a", "b"], "tags": [2, 0]}\n')
    found = TokenClassification(
        BERT, tokenizer="bytes", data={"train": str(by_number)}, sequence_length=32, labels=["O", "B-X", "I-X"]
    )
    labels = found.datasets()[TRAIN].arrays["labels"]
    assert labels.values[labels.values != IGNORED].tolist() == [2, 0]


def entities(tags):
    """Entities of a row as conlleval finds them, word by word."""
    found, start, before = set(), None, ("O", "O")
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-") if tag != "O" else ("O", "", "O")
        is_new = prefix in "BS" or before[0] in "OES" or kind != before[1]
        if start is not None and (prefix == "O" or is_new):
            found.add((start, place - 1, before[1]))
            start = None
        if prefix != "O" and start is None:
            start = place
        before = prefix, kind
    return found


@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_entities_are_those_of_conlleval(prefixes):
    names = ["O", *(f"{prefix}-{kind}" for prefix in prefixes for kind in "XY")]
    draw = torch.Generator().manual_seed(0)
    lengths = [1, 9, 4, 40, 2]
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    for _ in range(20):
        right = torch.randint(len(names), (len(rows),), generator=draw)
        found = torch.where(torch.rand(len(rows), generator=draw) < 0.7, right, torch.randint(len(names), (len(rows),), generator=draw))  # fmt: skip
        expected, own = (
            {(row, *entity) for row in range(5) for entity in entities([names[n] for n in tags[rows == row]])}
            for tags in (right, found)
        )
        pairs = {name: (int(a), int(b)) for name, (a, b) in entity_metrics(found, right, rows, names).items()}
        both = len(expected & own)
        assert pairs == {"precision": (both, len(own)), "recall": (both, len(expected)), "f1": (2 * both, len(own) + len(expected))}  # fmt: skip


def test_f1_by_tag_is_that_of_scikit_learn():
    from sklearn.metrics import f1_score

    draw = torch.Generator().manual_seed(0)
    right, found = (torch.randint(4, (50,), generator=draw) for _ in range(2))
    pairs = tag_metrics(found, right, torch.zeros(50), ["NOUN", "VERB", "ADJ", "X", "never"])
    ours = [float(total) / count for total, count in pairs.values()]
    assert ours == pytest.approx(f1_score(right, found, average=None)) and len(ours) == 4


@pytest.mark.parametrize(
    ("record", "args", "words"),
    [
        ({"words": ["a", "b"], "tags": ["O"]}, {}, "has 1 tags for 2 words"),
        ({"words": "a b", "tags": ["O"]}, {}, "must be a list with one element per word"),
        ({"words": ["a", 2], "tags": ["O", "O"]}, {}, "words must be text"),
        ({"words": ["a"], "tags": ["B-X"]}, {"labels": ["O"]}, "the tags are O"),
        ({"words": ["a"]}, {}, "column tags is missing or null in record 0"),
    ],
)
def test_what_are_no_tags_is_refused(tmp_path, record, args, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=words):
        TokenClassification(BERT, tokenizer="bytes", data={"train": str(path)}, sequence_length=32, **args).datasets()


def test_answers_are_generated_for_rows_spread_over_the_split(texts):
    sources = seq2seq(texts, generated_rows=3).datasets()
    chosen = sources["val"].arrays["is_generated"]
    assert chosen.sum() == 3 and chosen[[0, -1]].all()
    assert not sources[TRAIN].arrays["labels"].values.min() < 0
    eos = seq2seq(texts).tokenizer.eos_token_id
    assert all(row[-1] == eos for row in sources[TRAIN].arrays["labels"])
    assert seq2seq(texts, generated_rows=0).evaluate is None
    short = seq2seq(texts, target_length=4).datasets()[TRAIN].arrays["labels"]
    assert set(short.lengths) == {4} and all(row[-1] == eos for row in short)


# but for files that other tests left open, which may be collected meanwhile
@pytest.mark.filterwarnings("error", "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_learned_answer_is_generated_exported_and_generated_again(texts, tmp_path):
    import transformers

    workload = seq2seq(texts, rouge=True)
    flags = {**FLAGS, "stop.after": "60 epochs", "evaluation.every": "60 epochs", "precision.dtype": "fp32", "batch.micro_size": None}  # fmt: skip
    run = train_alone(workload, flags)
    metrics = run.evaluations[-1].metrics
    assert metrics["val/exact_match"] > 0.5 and metrics["val/rougeL"] >= metrics["val/exact_match"]
    model = workload.build_model()
    model.load_state_dict(run.weights)
    source = workload.datasets()["val"]
    batch = batch_of(source, rows=source.num_rows, collate=workload.collate)
    texts_of = workload.predict(model.eval(), batch)["text"]
    targets = workload.tokenizer.batch_decode([row[row != IGNORED] for row in batch["labels"]], skip_special_tokens=True)  # fmt: skip
    share = sum(a == b for a, b in zip(texts_of, targets, strict=True)) / len(targets)
    assert share == pytest.approx(metrics["val/exact_match"])
    workload.export(run.weights, tmp_path / "out")
    other = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    ids = other.generate(input_ids=batch["input_ids"].long(), attention_mask=batch["attention_mask"].long(), max_new_tokens=12)  # fmt: skip
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").batch_decode(ids, skip_special_tokens=True) == texts_of  # fmt: skip


def test_rouge_is_that_of_the_rows_one_by_one(texts):
    from torchmetrics.functional.text.rouge import rouge_score

    workload = seq2seq(texts, rouge=True)
    model, source = built(workload), workload.datasets()["val"]
    answers = [f"makes {n} more" for n in range(source.num_rows)]
    workload.predict = lambda model, batch: {"text": [answers.pop(0) for _ in batch["input_ids"]]}
    batch = lambda: batch_of(source, rows=source.num_rows, collate=workload.collate)
    expected = rouge_score(list(answers), workload.tokenizer.batch_decode([row[row != IGNORED] for row in batch()["labels"]], skip_special_tokens=True), rouge_keys=("rouge1", "rougeL"))  # fmt: skip
    found = workload.evaluate(model, itertools.chain([batch()]), split="val", rank=0, world_size=1)
    assert found["rouge1"][0] / found["rouge1"][1] == pytest.approx(float(expected["rouge1_fmeasure"]))
    assert found["rougeL"][0] / found["rougeL"][1] == pytest.approx(float(expected["rougeL_fmeasure"]))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"model": BERT}, "(?s)a bert.*no encoder and decoder"),
        ({"target_length": 1}, "target_length"),
        ({"generated_rows": -1}, "generated_rows"),
        ({"target": "nowhere"}, "column nowhere is missing or null in record 0"),
    ],
)
def test_what_cannot_answer_is_refused(texts, args, words):
    with pytest.raises((ConfigError, DataError, WorkloadError), match=words):
        seq2seq(texts, **args).datasets()
