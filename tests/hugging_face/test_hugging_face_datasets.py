"""Datasets and streams of Hugging Face's `datasets`, as its users write them: the rows of a plain loop, in its order."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from small_models import BERT, HuggingFaceWorkload
from small_runs import largest_difference, make_job, relative_differences, train, train_alone

from scaleray.data import TRAIN, IterableSource, Part, Ragged, StepPlan, as_source, load_sources
from scaleray.data.blocks import LocalBlocks
from scaleray.data.hugging_face_data import BlockSource
from scaleray.errors import DataError
from scaleray.hugging_face import SequenceClassification, TokenClassification
from scaleray.lightning.loaders import train_source
from scaleray.verification.check.data_checks import sendable

FLAGS = {"optimizer.learning_rate": 0.05, "stop.after": "6 steps", "batch.micro_size": 2, "checkpoint.every": "1 steps"}
NUM = 26


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory):
    """Rows of 3 to 9 tokens with a label each, in a file of JSON lines and, in two parts, in two others."""
    folder, draw = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    lines = []
    for n in range(NUM):
        ids = draw.integers(1, 50, 3 + n % 7).tolist()
        lines.append(json.dumps({"input_ids": ids, "labels": [i % 3 for i in ids], "x": [n, 0.5], "number": n}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    for part in range(2):
        (folder / f"part-{part}.jsonl").write_text("".join(lines[13 * part : 13 * (part + 1)]))
    return folder / "rows.jsonl"


def loaded(path, *, cache=None, **more):
    files = str(path) if isinstance(path, Path) else list(map(str, path))
    return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(cache or Path(path).parent), **more)  # fmt: skip


def parts_of(rows_file):
    return loaded([rows_file.with_name(f"part-{n}.jsonl") for n in range(2)], cache=rows_file.parent, streaming=True)


class Own(HuggingFaceWorkload):
    """A user's workload over a Dataset that is tokenised already."""

    auto_class = "AutoModelForTokenClassification"

    def __init__(self, given):
        super().__init__({**BERT, "vocab_size": 50, "num_labels": 3})
        self.given = given

    def datasets(self):
        return self.given if isinstance(self.given, dict) else {TRAIN: self.given}


def arrays(rows_file):
    records = [json.loads(line) for line in rows_file.read_text().splitlines()]
    return {name: [np.array(record[name]) for record in records] for name in ("input_ids", "labels")}


def on_a_worker(place, workload, flags):
    return train(place, workload, flags)


def tokens_alone(dataset):
    return dataset.select_columns(["input_ids", "labels"])


@pytest.mark.always("shards")
@pytest.mark.parametrize("form", ["plain", "torch", "numpy", "shards", "dict"])
def test_a_dataset_trains_as_the_same_arrays_do_on_one_and_two_workers_and_over_a_resume(
    form, rows_file, gloo, tmp_path
):
    rows, flags = tokens_alone(loaded(rows_file)), {**FLAGS, "data.bucket_by_length": 2}
    if form == "shards":  # of two files, joined
        halves = [loaded(rows_file.with_name(f"part-{n}.jsonl")) for n in range(2)]
        rows = tokens_alone(datasets.concatenate_datasets(halves))
    elif form == "dict":
        rows = datasets.DatasetDict({TRAIN: rows})
    elif form != "plain":
        rows = rows.with_format(form)
    workload, expected = Own(rows), train_alone(Own({TRAIN: arrays(rows_file)}), flags)
    alone = train_alone(workload, flags)
    assert alone.losses == expected.losses and largest_difference(alone.weights, expected.weights) == 0
    both = gloo.run(2, on_a_worker, workload, flags)[0]
    assert max(relative_differences(both.losses, alone.losses)) < 1e-9
    train_alone(workload, flags, folder=tmp_path, kill_at=4)
    assert train_alone(workload, flags, folder=tmp_path).losses == alone.losses[4:]


@pytest.mark.parametrize("kind", [SequenceClassification, TokenClassification])
@pytest.mark.parametrize("streaming", [False, True])
def test_ready_workloads_take_a_dataset_in_place_of_its_file(kind, streaming, texts, gloo, tmp_path):
    args = {"tokenizer": "bytes", "sequence_length": 24}
    given = datasets.load_dataset("json", data_files={"train": texts}, cache_dir=str(tmp_path), streaming=streaming)
    expected = train_alone(kind(BERT, data={"train": texts}, **args), FLAGS)
    workload = kind(BERT, data=given, **args)
    assert train_alone(workload, FLAGS).losses == expected.losses
    if streaming:
        return
    both = gloo.run(2, on_a_worker, workload, FLAGS)[0]
    assert max(relative_differences(both.losses, expected.losses)) < 1e-9


def test_classes_of_a_dataset_have_its_names_and_order(texts):
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])})
    given = {"train": datasets.Dataset.from_dict({"text": ["b c", "d e", "f g"], "label": [1, 0, 1]}, kinds)}
    workload = SequenceClassification(BERT, tokenizer="bytes", data=given, sequence_length=8)
    assert workload.datasets()["train"].arrays["labels"].tolist() == [1, 0, 1]
    assert workload.config().id2label == {0: "z", 1: "a"}
    tags = datasets.Features({"words": datasets.List(datasets.Value("string")), "tags": datasets.List(datasets.ClassLabel(names=["O", "B-X"]))})  # fmt: skip
    rows = datasets.Dataset.from_dict({"words": [["b", "c"], ["d"]], "tags": [[1, 0], [0]]}, tags)
    tagger = TokenClassification(BERT, tokenizer="bytes", data={"train": rows}, sequence_length=8)
    assert tagger.names == ["O", "B-X"]
    assert [row[row >= 0].tolist() for row in tagger.datasets()["train"].arrays["labels"]] == [[1, 0], [0]]
    kinds = datasets.Features({**kinds, "label": datasets.ClassLabel(names=["z", "a", "unused"])})
    unlabelled = {"train": datasets.Dataset.from_dict({"text": ["b c"], "label": [-1]}, kinds)}
    with pytest.raises(DataError, match="column label is missing or null in record 0 of the train data"):
        SequenceClassification(BERT, tokenizer="bytes", data=unlabelled, sequence_length=8).datasets()


def test_a_column_label_holds_the_labels_as_for_transformers_collators(rows_file):
    rows = tokens_alone(loaded(rows_file)).rename_column("labels", "label")
    batch = Own(rows).collate(as_source(rows.rename_column("label", "labels"), split="train").read(np.arange(4)))
    renamed = Own(rows).collate({"input_ids": Ragged.of([np.array([4, 5]), np.array([7])]), "label": np.array([1, 0])})
    assert renamed["labels"].tolist() == [1, 0] and "label" not in renamed and batch["labels"].shape == (4, 6)


def test_the_example_of_the_page_trains(rows_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"words": [n % 5, 1, 2][: 1 + n % 3]}) + "\n" for n in range(20)))  # fmt: skip
    page = (Path(__file__).parents[2] / "docs/hugging_face.md").read_text()
    names = {
        "HuggingFaceWorkload": HuggingFaceWorkload,
        "load_dataset": lambda *args, **more: datasets.load_dataset(*args, cache_dir=str(tmp_path), **more),
        "to_tokens": lambda batch: {"input_ids": batch["words"], "labels": batch["words"]},
    }
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    run = train_alone(names["Tagger"]({**BERT, "vocab_size": 50, "num_labels": 5}), {**FLAGS, "stop.after": "2 epochs"})
    assert run.losses[-1] < run.losses[0]


# rows that are read by index


def same(columns, rows):
    for name, column in columns.items():
        values = [np.asarray(row[name]) for row in rows]
        assert len(column) == len(values)
        assert all(np.array_equal(own, value) for own, value in zip(column, values, strict=True))


@pytest.mark.parametrize("form", [None, "torch", "numpy", "arrow"])
@pytest.mark.parametrize("change", ["none", "shuffle", "select", "map"])
def test_blocks_have_the_rows_that_were_asked_for(form, change, rows_file):
    rows = loaded(rows_file)
    rows = {"none": lambda: rows, "shuffle": lambda: rows.shuffle(seed=3), "select": lambda: rows.select(range(4, 20)),
            "map": lambda: rows.map(lambda row: {"twice": 2 * row["number"]})}[change]()  # fmt: skip
    source, order = as_source(rows.with_format(form), split="train"), np.array([7, 0, 11, 7, 15])
    assert type(source) is BlockSource and source.num_rows == len(rows) and not source.gives_tuples
    found = source.read(order)
    same(found, [rows.with_format(None)[i] for i in order.tolist()])
    assert found["number"].flags.writeable and found["input_ids"].values.flags.writeable  # Arrow's memory is not
    assert source.lengths.tolist() == [len(row["input_ids"]) for row in rows.with_format(None)]
    assert isinstance(found["input_ids"], Ragged) and found["x"].shape == (5, 2)
    assert found["input_ids"].dtype == found["number"].dtype == np.int64
    arrived = pickle.loads(cloudpickle.dumps(source))
    same(arrived.read(order), [rows.with_format(None)[i] for i in order.tolist()])
    # rows of one length by chance are ragged as all others
    assert isinstance(source.read(np.array([3])), dict) and isinstance(source.read(np.array([3]))["labels"], Ragged)


def test_mapped_files_are_sent_by_path_and_tables_in_memory_are_shared(rows_file):
    from_file = as_source(loaded(rows_file), split="train")
    assert len(pickle.dumps(from_file)) < 5000
    table = as_source(datasets.Dataset.from_dict({"x": np.zeros((500, 40)).tolist()}), split="train")
    copy = table.as_given.copy()
    assert copy.data.table is table.as_given.copy().data.table and copy is not table.as_given.copy()
    buffers = []
    state = pickle.dumps(table, protocol=5, buffer_callback=buffers.append)
    assert len(state) < 10_000 and sum(buffer.raw().nbytes for buffer in buffers) >= 500 * 40 * 8
    assert pickle.loads(state, buffers=[bytes(b.raw()) for b in buffers]).read(np.arange(3))["x"].shape == (3, 40)


def test_rows_of_with_transform_are_read_one_by_one_and_seeded(rows_file):
    def noisy(batch):
        longest = max(map(len, batch["input_ids"]))  # of a block this would be another length
        padded = [ids + [0] * (longest - len(ids)) for ids in batch["input_ids"]]
        return {"ids": [torch.tensor(ids) + torch.rand(len(ids)) for ids in padded]}

    rows = loaded(rows_file).with_transform(noisy)
    source = as_source(rows, split="train")
    assert type(source) is not BlockSource and source.row_values.draw_random_numbers
    assert source.read(np.arange(8))["ids"].lengths.tolist() == [len(rows[i]["ids"]) for i in range(8)]
    plan = StepPlan(NUM, 8, seed=3, shuffle=True)
    whole, half = (_steps(source, plan, world_size) for world_size in (1, 2))
    assert whole == half
    assert list(sendable({"train": source})) == []


def test_images_are_decoded_row_by_row(tmp_path):
    from PIL import Image

    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    pictures = [Image.fromarray(np.full((4, 3 + n, 3), n, np.uint8)) for n in range(4)]
    source = as_source(datasets.Dataset.from_dict({"image": pictures, "label": [0, 1, 0, 1]}, kinds), split="train")
    assert [image.shape for image in source.read(np.array([2, 0]))["image"]] == [(4, 5, 3), (4, 3, 3)]


def _steps(source, plan, world_size=1, first_step=0, steps=9, column=None):
    """Bytes of the rows of each step, over all workers."""
    found = {step: [] for step in range(first_step, steps)}
    for rank in range(world_size):
        part = Part(plan, rank, world_size, first_step, steps)
        blocks = LocalBlocks(source, part, chunk_bytes=99)
        rows = (row for block in blocks for row in block[column or next(iter(block))])
        for step in found:
            wanted = part.num_rows(step)
            found[step] += [np.asarray(row).tobytes() for row in itertools.islice(rows, max(1, wanted))][:wanted]
    return found


# streams


STREAMS = {
    "one file": lambda file: loaded(file, streaming=True),
    "two files": parts_of,
    "shuffled": lambda file: parts_of(file).shuffle(seed=5, buffer_size=7),
    "torch": lambda file: parts_of(file).with_format("torch"),
    "mapped": lambda file: parts_of(file).map(lambda batch: {"number": [2 * n for n in batch["number"]]}, batched=True),
    "from a Dataset": lambda file: loaded(file).to_iterable_dataset(num_shards=3),
}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_steps_of_a_stream_are_the_same_on_any_number_of_workers_from_any_step(kind, shuffle, rows_file):
    stream = STREAMS[kind](rows_file)
    source = as_source(stream, split="train")
    assert isinstance(source, IterableSource) and source.num_rows == NUM and source.deals_by == ""
    plan = StepPlan(NUM, 8, seed=3, shuffle=shuffle, window_rows=7)
    steps = lambda *place: _steps(source, plan, *place, column="number")
    whole = steps()
    for world_size, first_step in ((2, 0), (3, 5), (1, 6)):
        found = steps(world_size, first_step)
        assert found == {step: whole[step] for step in found}
    arrived = pickle.loads(cloudpickle.dumps(source))
    assert _steps(arrived, plan, 2, column="number") == whole
    # every row once an epoch, in the library's own order of that epoch
    for epoch in range(2):
        found = [row for step in range(4 * epoch, 4 * epoch + 4) for row in whole[step]]
        stream.set_epoch(epoch)
        given = [np.asarray(row["number"]).tobytes() for row in stream]
        assert sorted(found) == sorted(given) and (shuffle or found == given)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["one file", "shuffled", "torch"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_trains_alike_on_two_workers_and_over_a_resume(kind, shuffle, rows_file, gloo, tmp_path):
    stream = STREAMS[kind](rows_file).select_columns(["input_ids", "labels"])
    flags = {**FLAGS, "data.shuffle": shuffle, "data.window_rows": 9}
    workload = Own({TRAIN: stream, "val": stream})
    alone = train_alone(workload, flags)
    if kind == "one file" and not shuffle:
        assert alone.losses == train_alone(Own({TRAIN: arrays(rows_file)}), flags).losses
    both = gloo.run(2, on_a_worker, workload, flags)[0]
    assert max(relative_differences(both.losses, alone.losses)) < 1e-9
    train_alone(workload, flags, folder=tmp_path, kill_at=4)
    assert train_alone(workload, flags, folder=tmp_path).losses == alone.losses[4:]
    job, _ = make_job(workload, flags)
    assert "every worker reads all rows and keeps its own" in job.sample_order


@pytest.mark.parametrize("kind", ["parquet", "text"])
def test_streams_of_other_files(kind, tmp_path):
    if kind == "parquet":
        datasets.Dataset.from_dict({"n": list(range(30))}).to_parquet(tmp_path / "rows.parquet", batch_size=10)
    else:
        (tmp_path / "rows.text").write_text("".join(f"{n}\n" for n in range(30)))
    rows = datasets.load_dataset(kind, data_files=str(tmp_path / f"rows.{kind}"), split="train", streaming=True, cache_dir=str(tmp_path))  # fmt: skip
    if kind == "text":
        with pytest.raises(DataError, match=r"column text is '<U1'.*\n.*or omit the column"):
            as_source(rows, split="train")
        rows = rows.map(lambda row: {"n": int(row["text"])}, remove_columns=["text"])
    plan = StepPlan(30, 10, shuffle=False)
    found = _steps(as_source(rows, split="train"), plan, 2, steps=3, column="n")
    assert [int.from_bytes(row, "little") for step in found.values() for row in step] == list(range(30))


def test_splits_and_processes_have_an_epoch_of_their_own(rows_file):
    make = lambda: parts_of(rows_file).select_columns(["number"]).shuffle(seed=5, buffer_size=7)
    stream, alone, plan = make(), make(), StepPlan(NUM, 13, shuffle=False)
    orders = []
    for epoch in range(2):
        alone.set_epoch(epoch)
        orders.append([row["number"] for row in alone])
    assert orders[0][:3] != orders[1][:3]
    training, val = (source.opened() for source in load_sources(_Gives({TRAIN: stream, "val": stream})).values())
    for place in (0, 1, 2):  # the two take turns in different epochs, and another process has a third
        stream.set_epoch(7)
        assert training.read_on(np.arange(26 + place, 27 + place), plan)["number"] == orders[1][place]
        assert val.read_on(np.arange(place, place + 1), plan)["number"] == orders[0][place]
        assert int(training.dataset._epoch) == 1 and int(val.dataset._epoch) == 0


def test_loaders_of_lightning_over_a_stream_give_each_worker_its_rows(rows_file):
    numbers = parts_of(rows_file).select_columns(["number"])
    source = train_source(torch.utils.data.DataLoader(numbers, batch_size=4))
    plan = StepPlan(NUM, 8, shuffle=False)
    assert source.deals_by == "" and source.num_rows == NUM
    one, two = (_steps(source, plan, workers) for workers in (1, 2))
    assert one == two and [int.from_bytes(row, "little") for step in range(4) for row in one[step]] == list(range(NUM))
    opened = [source.opened(), source.opened()]
    opened[0].dataset.set_epoch(3)
    assert int(opened[1].dataset.items._epoch) == int(numbers._epoch) == 0
    with pytest.raises(DataError, match="is a part of a stream"):
        train_source(torch.utils.data.DataLoader(split_dataset_by_node(numbers, rank=0, world_size=2)))


class _Gives:
    def __init__(self, splits):
        self.splits = splits

    def datasets(self):
        return self.splits


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: split_dataset_by_node(s, rank=0, world_size=2), "is a part of a stream.*omit split_dataset_by_node"),
        (lambda s: s.load_state_dict(s.state_dict()) or s, "is a stream with a loaded state.*a resumed run finds"),
        (lambda s: s.with_format("pandas"), "the format of the train data is pandas"),
        (lambda s: s.with_format("arrow"), "the format of the train data is arrow"),
    ],
)
def test_streams_that_cannot_be_exact_are_refused_by_name(change, words, rows_file):
    stream = loaded(rows_file, streaming=True)
    next(iter(stream))
    with pytest.raises(DataError, match=f"(?s){words}"):
        as_source(change(stream), split="train")
    with pytest.raises(DataError, match="the format of the train data is pandas"):
        as_source(loaded(rows_file).with_format("pandas"), split="train")


def test_scaleray_does_not_import_datasets_for_data_of_its_own():
    statement = (
        "import sys, numpy as np, scaleray.hugging_face as h; from scaleray.data import as_source; h.TokenClassification;"
        "as_source({'x': np.zeros(3)}, split='train'); print('datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["False"], done.stderr
