"""What workers are told about the data, and the final weights as a file."""

import dataclasses

import pytest
import torch
from small_runs import Classify, make_job

from scaleray.data import Split, StreamSource, as_source
from scaleray.errors import DataError
from scaleray.strategies.contract.weight_shares import WeightShare
from scaleray.training.setup.job import MANY_EPOCHS
from scaleray.training.state.final_weight_files import save_weights


class Stream:
    """A Ray Dataset as far as the driver looks at it: a module name and a count."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def count(self):
        return self.num_rows


Stream.__module__ = "ray.data.dataset"


def test_an_evaluation_reads_every_row_once_in_file_order():
    job, _ = make_job(Classify(num_val=11), {"evaluation.micro_size": 3}, world_size=2)
    (split,) = job.evaluation_splits()
    plan = job.evaluation_plan(split)
    assert (split.name, plan.global_batch_size, plan.steps_per_epoch, plan.shuffle) == ("val", 6, 2, False)
    assert [index for step in range(2) for index in plan.global_indices(step)] == list(range(11))


def test_a_split_smaller_than_a_batch_is_one_step():
    job, _ = make_job(Classify(num_val=2))
    assert job.evaluation_plan(job.splits["val"]).steps_per_epoch == 1


def test_a_ray_dataset_is_streamed_with_the_same_number_of_rows_for_every_worker():
    source = as_source(Stream(27), split="val")
    assert isinstance(source, StreamSource)
    split = Split.of("val", source)
    assert split.is_streamed and not split.gives_tuples
    assert source.describe()["rows"] == 27
    with pytest.raises(TypeError):
        source.read(None)
    job, _ = make_job(Classify(), world_size=2)
    plan = job.evaluation_plan(split)
    assert plan.num_samples == 26 and plan.promise.startswith("weak")


@pytest.mark.parametrize(("settings", "is_told"), [({}, True), ({"monitoring.port": 0}, False)])
def test_a_ray_dataset_that_is_read_so_often_that_ray_keeps_too_many_metrics_is_told(settings, is_told):
    epochs = MANY_EPOCHS + 1
    told = warnings_of_stream({"stop.after": f"{epochs} epochs", **settings})
    assert [f"a Ray Dataset that is read {epochs} times" in text for text in told] == [True] * is_told
    assert warnings_of_stream({"stop.after": f"{MANY_EPOCHS} epochs", **settings}) == []


def warnings_of_stream(settings):
    job, _ = make_job(Classify(), settings)
    streamed = dataclasses.replace(job.splits["train"], is_streamed=True)
    return dataclasses.replace(job, splits={**job.splits, "train": streamed}).data_warnings()


def test_an_empty_ray_dataset_is_refused():
    with pytest.raises(DataError, match="the train data is empty"):
        as_source(Stream(0), split="train")


@pytest.mark.parametrize("as_uri", [False, True])
def test_weights_are_saved_as_a_plain_state_dict_to_a_path_or_a_uri(tmp_path, as_uri):
    weights = {"a": torch.arange(3.0), "b": torch.tensor(5)}
    save_weights(WeightShare(weights), tmp_path.as_uri() if as_uri else str(tmp_path), rank=0)
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_workers_that_hold_one_replica_are_one_share_of_an_evaluation():
    flags = {"strategy.name": "tensor", "parallel.tensor": 2, "evaluation.micro_size": 3}
    job, _ = make_job(Classify(num_val=30), flags, world_size=4)
    (split,) = job.evaluation_splits()
    assert job.evaluation_plan(split).global_batch_size == 2 * 3
