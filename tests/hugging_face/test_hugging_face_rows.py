"""Rows of tokens, and models that a config or a folder describes."""

from __future__ import annotations

import os
import pickle
import sys

import numpy as np
import pytest
import torch
from small_models import BERT, GPT2, LLAMA, Causal, batch_of, built, causal
from torch import nn

from scaleray.common.model_blocks import find_blocks
from scaleray.data.row_random import RowRandom
from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.hugging_face import HuggingFaceWorkload, summed_loss
from scaleray.hugging_face.classifier_losses import ONE_CLASS, SEVERAL_CLASSES, label_kind
from scaleray.hugging_face.language_models import Masking, conversations
from scaleray.hugging_face.text_files import read_records
from scaleray.hugging_face.token_rows import IGNORED, Tokens, concatenated, packed, padded
from scaleray.hugging_face.tokenizers import byte_tokenizer
from scaleray.workload import load_workload


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
    with pytest.raises(DataError, match="too few for a row of 64"):
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
    with pytest.raises(DataError, match="has no text of the assistant"), pytest.warns(UserWarning, match="1 of 1"):
        conversations([CHAT], tokenizer, length=4, what="train")
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(WorkloadError, match="changes earlier messages"):
        conversations([CHAT], tokenizer, length=200, what="train")
    tokenizer.chat_template = None
    with pytest.raises(WorkloadError, match="has no chat template"):
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
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    return [
        ({"model": str(folder / "run")}, "(?s)a scaleray run.*scaleray export .*run --out FOLDER"),
        ({"model": str(folder / "nowhere")}, "nothing is downloaded from a hub"),
        ({"model": str(folder / "pickled")}, "only safetensors files are read"),
        ({"model": str(folder / "list.json")}, "model_type"),
        ({"model": str(folder / "empty")}, "has no config.json"),
        ({"model": {"hidden_size": 4}}, "model_type of workload.args.model is missing"),
        ({"model": {"model_type": "no_such_model"}}, "transformers .* has no such model"),
        ({"tokenizer": None}, "workload.args.tokenizer is required: the model's folder has no tokenizer"),
        ({"tokenizer": str(folder / "nowhere")}, "no such folder or file exists here"),
        ({"tokenizer": str(folder / "empty")}, "has none of tokenizer.json"),
        ({"tokenizer": str(folder / "list.json")}, "list.json cannot be read"),
        ({"model": {**LLAMA, "vocab_size": 100}}, "has 261 tokens, while the model has 100"),
        ({"model": {**LLAMA, "max_position_embeddings": 8}}, "the model has 8 positions"),
        ({"packing": "tight"}, "concatenate, separate, pad"),
        ({"data": {"val": "x"}}, "including train"),
        ({"data": {"train": str(folder / "nowhere.jsonl")}}, "no file matches it"),
        ({"text": "body"}, "column body is missing or null in record 0 of the train data"),
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


def test_linked_folders_and_names_that_are_not_utf_8_hold_texts(tmp_path):
    for folder in ("store", "data/own"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.txt").write_text(folder)
    os.rename(tmp_path / "data/own/a.txt", os.fsencode(tmp_path / "data/own") + b"/caf\xe9.txt")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "store")
    (tmp_path / "data" / "own" / "round").symlink_to(tmp_path / "data")
    (tmp_path / "data" / ".hidden").write_text("hidden")
    records = list(read_records(str(tmp_path / "data"), what="train"))
    assert sorted(record["text"] for record in records) == ["data/own", "store"]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["pos", "neg", " pos"], "the label of record 2 of the train data is ' pos': the label of record 0 is 'pos'"),
        (["pos", "", "neg"], "the label of record 1 of the train data is '': a class needs a name"),
        ([1, "1"], "the label of record 1 of the train data is '1': the label of record 0 is 1"),
    ],
)
def test_classes_that_look_alike_or_have_no_name_are_refused(labels, words):
    with pytest.raises(DataError, match=words):
        label_kind(ONE_CLASS, labels, None, order=list)
    with pytest.raises(DataError, match=words):
        label_kind(SEVERAL_CLASSES, [[label] for label in labels], None, order=list)


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(WorkloadError, match=r"pip install '[^']+\[hugging-face\]'"):
        Causal({**LLAMA, "vocab_size": 50}, peft={"r": 2}).build_model()


def test_labels_of_another_shape_than_the_logits_are_refused():
    with pytest.raises(WorkloadError, match="one label per position"):
        summed_loss(torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.long))


QUOTED = 'text,label\n"good, so",pos\n"bad",neg\n'


@pytest.mark.parametrize(
    ("ending", "content", "words"),
    [
        ("csv", QUOTED + "slow, but good,pos\n", r"train\.csv, line 4 has 3 fields, but the header has 2"),
        ("csv", 'text,label\n"two\nlines",pos\nfew\n', r"train\.csv, line 4 has 1 field, but the header"),
        ("csv", QUOTED + '"not closed,pos\n"a",neg\n', r"train\.csv, line 4 is not CSV"),
        ("csv", QUOTED + '"not closed,pos\n', r"train\.csv, line 4 is not CSV"),
        ("csv", QUOTED + "a\0b,neg\n", r"train\.csv, line 4 has a NUL byte"),
        ("csv", "text,text\na,b\n", r"train\.csv, line 1 has a column twice"),
        ("tsv", "text\tlabel\na\tb\tc\n", r"train\.tsv, line 2 has 3 fields"),
        ("jsonl", '{"text": "a"}\n{"text": \n', r"train\.jsonl, line 2 is not JSON"),
        ("csv", QUOTED.encode("utf-16"), "is not UTF-8"),
    ],
    ids=["comma", "few", "quote", "quote at the end", "NUL", "header", "tab", "JSON", "UTF-16"],
)
def test_a_broken_row_is_refused_with_its_file_and_line(ending, content, words, tmp_path):
    path = tmp_path / f"train.{ending}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words):
        list(read_records(path, what="train"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_rows_with_a_mark_of_utf_8_and_long_fields_are_read(encoding, tmp_path):
    (tmp_path / "a.csv").write_text(QUOTED + '"' + "long " * 30_000 + '",neg\n\n', encoding=encoding)
    (tmp_path / "b.tsv").write_text("text\tlabel\na, b\tpos\n", encoding=encoding)
    (tmp_path / "c.jsonl").write_text('{"text": "c", "label": "neg"}\n', encoding=encoding)
    (tmp_path / "d.txt").write_text("d", encoding=encoding)
    found = list(read_records(tmp_path, what="train"))
    assert [record["text"][:7] for record in found] == ["good, s", "bad", "long lo", "a, b", "c", "d"]
    assert [record.get("label") for record in found] == ["pos", "neg", "neg", "pos", "neg", None]
