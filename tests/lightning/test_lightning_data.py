"""Loaders of a LightningModule: what its steps get is what its own loaders would have given, whatever these look like."""

import pickle
import sys

import cloudpickle
import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from lit_modules import FLAGS, Data, Plain, farthest, tensors, with_lightning, with_scaleray
from small_runs import largest_difference, same_generators, train
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from scaleray.data import as_source
from scaleray.errors import DataError
from scaleray.lightning import as_workload


class Items(Dataset):
    """Items of any structure."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def given(workload, split="train", rows=3):
    """What a step of this split gets: the first rows in file order."""
    columns = as_source(workload.datasets()[split], split=split).read(np.arange(rows))
    return workload.collate(columns)["batch"]


def same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


STRUCTURES = {
    "a tensor": lambda i: torch.full((2,), float(i)),
    "a pair": lambda i: (torch.full((2,), float(i)), i),
    "a dict": lambda i: {"x": np.full(3, i, np.float32), "odd key.": float(i), "flag": bool(i % 2)},
    "nested": lambda i: ({"a": (torch.tensor(i), torch.ones(2))}, [i, i + 1]),
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_items_of_any_structure_arrive_as_torchs_own_collation_puts_them_together(make):
    items = Items(*map(make, range(5)))
    workload = as_workload(Plain, lambda: {"train": DataLoader(items, 2)})()
    assert same(given(workload), default_collate([items[i] for i in range(3)]))


EXACT = {
    **STRUCTURES,
    "text": lambda i: {"text": "ä" * (i + 1), "label": i, "none": None},
    "lists": lambda i: ([1] * i, [0.5] * 3, f"{i}"),
    "ragged tensors": lambda i: (torch.arange(i + 1), torch.ones(i % 2, 2)),
    "a word": lambda i: "word" * i,
}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_a_loaders_own_collation_gets_the_items_as_they_were(make):
    items, seen = Items(*map(make, range(5))), []

    def collate(rows):
        seen.append(rows)
        return torch.zeros(len(rows))

    workload = as_workload(Plain, lambda: {"train": DataLoader(items, 2, collate_fn=collate)})()
    assert len(given(workload)) == 3
    (rows,) = seen
    for ours, theirs in zip(rows, (items[i] for i in range(3)), strict=True):
        if isinstance(theirs, dict) and isinstance(theirs.get("x"), np.ndarray):
            assert type(ours["x"]) is np.ndarray and ours["x"].dtype == np.float32
            ours, theirs = ({**each, "x": each["x"].tolist()} for each in (ours, theirs))
        assert same(ours, theirs)


class Padded(Plain):
    """Words of unequal length, padded by the loader's collation; the loss is the mean over rows."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def padding(rows):
    width = 6
    x = torch.stack([torch.nn.functional.pad(row["x"], (0, width - len(row["x"]))) for row in rows])
    return {"x": x, "y": torch.tensor([row["y"] for row in rows])}


class Ragged(Data):
    """A collation that is a method of the DataModule."""

    def setup(self, stage):
        super().setup(stage)
        x, y = self.rows["train"].tensors
        self.rows["train"] = Items(*({"x": row[: 2 + i % 5], "y": int(y[i])} for i, row in enumerate(x)))

    def train_dataloader(self):
        return DataLoader(self.rows["train"], batch_size=8, shuffle=True, collate_fn=self.pad)

    def pad(self, rows):
        return padding(rows)


def test_a_module_with_a_collation_of_its_own_trains_what_lightning_trains():
    workload = as_workload(Padded, Ragged)()
    ours = with_scaleray(workload)
    data = Ragged()
    data.setup("fit")
    loader = lambda sampler: DataLoader(data.rows["train"], batch_sampler=sampler, collate_fn=padding)
    theirs, _ = with_lightning(Padded, workload, loader=loader)
    assert farthest(ours.weights, theirs) < 1e-12


def test_ragged_rows_without_a_collation_are_refused():
    items = Items(*((torch.ones(2 + i % 2, 6), 0) for i in range(8)))
    with pytest.raises(DataError, match="has rows of unequal length"):
        given(as_workload(Plain, lambda: {"train": items})())


ROWS = TensorDataset(*tensors(12, seed=0))


@pytest.mark.parametrize(
    ("dataset", "order"),
    [
        (Subset(Subset(ROWS, [5, 3, 1, 0]), [2, 0, 1]), [1, 5, 3]),
        (ConcatDataset([Subset(ROWS, [4, 2]), Subset(ROWS, [9])]), [4, 2, 9]),
    ],
)
def test_parts_of_datasets_have_the_rows_that_they_have(dataset, order):
    batch = given(as_workload(Plain, lambda: {"train": DataLoader(dataset)})())
    assert torch.equal(batch[0], ROWS.tensors[0][order])


def test_a_sampler_over_some_rows_takes_those():
    loader = DataLoader(ROWS, 2, sampler=SubsetRandomSampler([7, 8, 2]))
    assert as_source(as_workload(Plain, lambda: {"train": loader})().datasets()["train"], split="train").num_rows == 3


def test_what_of_a_loader_has_no_effect_is_said():
    loader = DataLoader(ROWS, 3, drop_last=True, worker_init_fn=print)
    workload = as_workload(Plain, lambda: {"train": loader, "val": DataLoader(ROWS, 5, drop_last=True)})()
    sources = workload.datasets()
    said = " ".join(sources["train"].notes)
    for words in (
        "batches of 3; batch.global_size determines",
        "does not shuffle",
        "batch.drop_last",
        "worker_init_fn",
    ):
        assert words in said
    assert sources["val"].notes == ("its DataLoader drops the last batch; scaleray evaluates every row",)


@pytest.mark.parametrize("mode", [None, "max_size_cycle", "min_size"])
def test_several_train_loaders_run_side_by_side(mode):
    loaders = {"a": DataLoader(Subset(ROWS, [0, 1, 2, 3]), 2), "b": DataLoader(Subset(ROWS, [4, 5]), 2)}
    loader = CombinedLoader(loaders, mode) if mode else loaders
    workload = as_workload(Plain, lambda: {"train": loader})()
    batch = given(workload, rows=2 if mode == "min_size" else 3)
    assert torch.equal(batch["b"][0], ROWS.tensors[0][[4, 5] if mode == "min_size" else [4, 5, 4]])
    assert torch.equal(batch["a"][1], ROWS.tensors[1][: len(batch["a"][1])])
    with pytest.raises(DataError, match="of mode sequential"):
        as_workload(Plain, lambda: {"train": CombinedLoader(loaders, "sequential")})().datasets()


class TwoValidations(Plain):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_number", float(dataloader_idx), add_dataloader_idx=False)
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])


class ManyLoaders(Data):
    def val_dataloader(self):
        return [DataLoader(self.rows["val"], 8), DataLoader(self.rows["train"], 8)]

    def test_dataloader(self):
        return DataLoader(self.rows["val"], 8)


class Streamed(IterableDataset):
    """Rows one after another, to every worker alike."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class StreamedData(Data):
    def train_dataloader(self):
        return DataLoader(Streamed(self.rows["train"]), batch_size=8)


def weights_of(place, data):
    finished = train(place, as_workload(Plain, data)(), {**FLAGS, "data.shuffle": False, "stop.after": "10 steps"})
    return finished.weights, finished.summary and finished.summary.sample_order


@pytest.mark.combination
def test_an_iterable_dataset_is_taken_with_the_weaker_promise_by_name(gloo):
    by_index, promise = gloo.run(1, weights_of, Data)[0]
    assert "IterableDataset" not in promise
    for world_size in (1, 2):
        weights, promise = gloo.run(world_size, weights_of, StreamedData)[0]
        assert promise.startswith("as yielded by the IterableDataset") and "a resume reads its epoch" in promise
        assert largest_difference(weights, by_index) < 1e-11


def test_several_validation_loaders_are_splits_of_their_own_and_the_test_loader_is_one():
    metrics = with_scaleray(as_workload(TwoValidations, ManyLoaders)()).evaluations[-1].metrics
    assert metrics["val_0/number"] == 0 and metrics["val_1/number"] == 1
    assert metrics["test/loss"] == pytest.approx(metrics["val_0/loss"])
    assert metrics["val_0/acc"] != metrics["val_1/acc"]


class WithLoaders(Plain):
    """A module that brings its data itself, and asks for nothing else."""

    def setup(self, stage):
        self.rows = TensorDataset(*tensors(24, seed=0))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=8)


def test_a_module_may_bring_its_data_itself_and_objects_work_as_classes_do():
    assert len(with_scaleray(as_workload(WithLoaders)()).steps) == 20
    with same_generators():
        module, data = Plain(width=4), Data()
    workload = as_workload(module, data)()
    first = workload.build_model()
    assert first is not module and all(
        torch.equal(a, b) for a, b in zip(first.parameters(), module.parameters(), strict=True)
    )
    assert len(with_scaleray(workload).steps) == 20


def test_a_datamodule_from_datasets_works():
    data = L.LightningDataModule.from_datasets(ROWS, val_dataset=ROWS, batch_size=4)
    sources = as_workload(Plain, data)().datasets()
    assert sorted(sources) == ["train", "val"] and sources["train"].num_rows == 12


class Doubled(as_workload(Plain, Data)):
    """A class derived from that of a module, with a loss and an attribute of its own."""

    def __init__(self, factor, **args):
        super().__init__(**args)
        self.factor = factor

    def loss(self, model, batch):
        total, count = super().loss(model, batch)
        return total * self.factor, count


@pytest.mark.parametrize("by_value", [False, True])
def test_a_derived_class_travels_with_what_it_adds(by_value):
    """Workers got the class of the module itself, and trained its loss."""
    module = sys.modules[__name__]
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        sent = pickle.loads(cloudpickle.dumps(Doubled(2.0)))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    flags = {"stop.after": "1 steps"}
    [plain], [doubled] = (with_scaleray(each, flags).losses for each in (as_workload(Plain, Data)(), sent))
    assert sent.factor == 2.0 and doubled == pytest.approx(2 * plain)
