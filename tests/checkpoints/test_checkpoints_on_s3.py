"""Checkpoints in a bucket, here of a local emulator: saved, resumed, pruned, mended, and in spite of a server in trouble."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from saved_runs import assert_equal, catalog_of, make_saver, read_all, save
from small_runs import Classify, train_alone

from scaleray.checkpoints.consolidated import import_weights, load_weights
from scaleray.checkpoints.hugging_face import ModelFolder
from scaleray.checkpoints.retention import Retention
from scaleray.checkpoints.storage import Store
from scaleray.errors import StorageError
from scaleray.launch.session.run_folder import RunFolder
from scaleray.strategies.contract.weight_shares import Placed, WeightShare
from scaleray.training.state.final_weight_files import complete, forget, save_weights

FLAGS = {"checkpoint.every": "2 steps", "stop.after": "8 steps", "precision.dtype": "fp32", "optimizer.name": "adamw"}


class Bucket:
    """An emulated server whose answers can be spoilt."""

    def __init__(self):
        from moto.server import ThreadedMotoServer

        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        self.server.start()
        self.host, self.port = self.server.get_host_and_port()
        self.refuses = lambda method, path: False
        self.refused = 0
        serving = self.server._server
        answer = serving.app

        def app(environ, start_response):
            if self.refuses(environ["REQUEST_METHOD"], environ["PATH_INFO"]):
                self.refused += 1
                start_response("500 Internal Server Error", [("Content-Length", "0")])
                return [b""]
            return answer(environ, start_response)

        serving.app = app


@pytest.fixture(scope="module")
def server():
    bucket = Bucket()
    yield bucket
    bucket.server.stop()


@pytest.fixture
def bucket(server, monkeypatch, request):
    import pyarrow.fs

    endpoint = f"http://{server.host}:{server.port}"
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    pyarrow.fs.S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True).create_dir(name)
    server.root = f"s3://{name}/runs"
    yield server
    server.refuses = lambda method, path: False


@pytest.mark.combination
def test_a_run_in_a_bucket_is_saved_pruned_and_resumed(bucket):
    whole = train_alone(Classify(), FLAGS)
    folder = f"{bucket.root}/run"
    killed = train_alone(Classify(), FLAGS, folder=folder, kill_at=7)
    assert not killed.events
    catalog = catalog_of(folder)
    assert [m.step for m in catalog.complete()] == [6, 4]
    assert all(catalog.check(m) == [] for m in catalog.complete())
    resumed = train_alone(Classify(), FLAGS, folder=folder)
    assert resumed.losses == whole.losses[6:]
    assert_equal(resumed.weights, whole.weights)


def test_a_copy_in_a_bucket_heals_a_local_run_and_the_other_way_round(bucket, tmp_path):
    catalog = catalog_of(tmp_path / "run", bucket.root)
    tensors = {"t": torch.arange(100.0)}
    save(make_saver(catalog), 1, tensors)
    file = next(iter(catalog.read(1).files))
    catalog.stores[0].write(file, [b"spoilt"])
    (damage,) = catalog.check(catalog.read(1))
    assert damage.healed_from == catalog.stores[1].path(file)
    catalog.stores[1].delete(file)
    (damage,) = catalog.check(catalog.read(1))
    assert damage.healed_from == catalog.stores[0].path(file)
    assert catalog.check(catalog.read(1)) == []
    assert_equal(read_all(catalog, catalog.read(1)), tensors)


def test_weights_are_imported_to_a_bucket(bucket, tmp_path):
    for ending, write in (("pt", torch.save), ("safetensors", save_file)):
        local = tmp_path / f"weights.{ending}"
        write({"t": torch.arange(100.0)}, local)
        import_weights(str(local), f"{bucket.root}/imported-{ending}")
        into = {"t": torch.zeros(100)}
        load_weights(into, f"{bucket.root}/imported-{ending}/checkpoints/step-000000000")
        assert torch.equal(into["t"], torch.arange(100.0))


def test_pruning_leaves_what_others_name(bucket):
    catalog = catalog_of(f"{bucket.root}/run")
    saver = make_saver(catalog)
    for step in (1, 2, 3):
        save(saver, step, {"same": torch.ones(10), "other": torch.full((3,), float(step))})
    catalog.prune(Retention(keep_last=1))
    assert [m.step for m in catalog.complete()] == [3]
    assert_equal(read_all(catalog, catalog.read(3)), {"same": torch.ones(10), "other": torch.full((3,), 3.0)})
    catalog.rebuild(catalog.read(3))
    catalog.prune(Retention(keep_last=1))
    assert catalog.steps() == [3] and len(Store(f"{bucket.root}/run/checkpoints").entries("")) == 2


@pytest.mark.combination
def test_training_goes_on_while_the_server_answers_500(bucket):
    whole = train_alone(Classify(), FLAGS)
    folder = f"{bucket.root}/run"
    bucket.refused = 0
    bucket.refuses = lambda method, path: method in ("PUT", "POST") and "step-000000004" in path
    finished = train_alone(Classify(), FLAGS, folder=folder)
    assert bucket.refused and finished.losses == whole.losses
    assert len(finished.events) == 1 and "step 4 could not be written" in finished.events[0]
    catalog = catalog_of(folder)
    assert [m.step for m in catalog.complete()] == [8, 6]
    assert all(catalog.check(m) == [] for m in catalog.complete())


@pytest.mark.combination
def test_shares_of_final_weights_lie_in_the_bucket_and_come_to_mlflow_as_files(bucket):
    folder = f"{bucket.root}/finished"
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    layout = {"a": Placed(0, 24), "b": Placed(1, 4)}
    save_weights(WeightShare({"old": torch.ones(1)}), folder, rank=0)
    for rank, name in enumerate(tensors):
        save_weights(WeightShare({name: tensors[name]}, layout), folder, rank=rank)
        if rank == 0:
            with pytest.raises(StorageError, match="missing or torn"):
                complete(folder)
    names = complete(folder)
    names = [*names, "weights/sha256.json"]
    assert Store(folder).names() == ["weights"] and sorted(names) == Store(folder).names("weights")
    run = RunFolder("finished", folder, tempfile.mkdtemp())
    Path(run.work_dir, "record.json").write_text("{}")
    files = run.local(names)
    assert_equal(ModelFolder.open(str(Path(files[0]).parent)).read(), tensors)
    run.complete()
    assert Store(folder).names() == ["record.json", "weights"] and not Path(files[0]).exists()
    forget(folder)
    assert Store(folder).size(names[-1]) is Store(folder).size(names[-2]) is None


@pytest.mark.slow  # pyarrow asks again for 6 s; tests of damage do the same without a server
def test_a_server_that_answers_500_is_no_empty_bucket(bucket):
    folder = f"{bucket.root}/run"
    catalog = catalog_of(folder)
    save(make_saver(catalog), 1, {"t": torch.ones(3)})
    bucket.refuses = lambda method, path: method == "GET" and path.endswith("manifest.json")
    with pytest.raises(OSError, match=r"500|manifest"):
        catalog_of(folder).newest()
