"""One plain file of weights, as others read and write it, and back into a model."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model
from saved_runs import assert_equal, catalog_of, make_saver, save, snapshot
from small_runs import Classify, TiedAndFrozen, WithBatchNorm, make_job, train, train_alone
from test_stored_values import DTYPES
from torch import nn

from scaleray.checkpoints.catalog import Catalog
from scaleray.checkpoints.consolidated import import_weights, load_weights
from scaleray.checkpoints.manifest import Tensor
from scaleray.checkpoints.weight_files import safetensors_file
from scaleray.errors import CheckpointError

FLAGS = {"checkpoint.every": "2 steps", "stop.after": "4 steps", "precision.dtype": "fp32", "optimizer.name": "adamw"}


def varied(dtypes=DTYPES):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    return {
        **{f"layer.{name}": values.to(getattr(torch, name)) for name in dtypes},
        "empty": torch.zeros(0, 2),
        "scalar": torch.tensor(2.0),
        "ünï.code": values[:, ::2],
        "large": torch.arange(300_000, dtype=torch.int32),
    }


def written(file, tensors):
    """Write a state dict as others do; of tied tensors each under its name."""
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(apart, file) if str(file).endswith("safetensors") else torch.save(apart, file)


def stored(folder, tensors, step=7):
    catalog = catalog_of(folder)
    saver = make_saver(catalog)
    saver.save(
        step,
        {**{f"model.{name}": t for name, t in tensors.items()}, "optimizer.x": torch.ones(3)},
        volatile=set(),
        values=lambda gather: {},
        facts={"config_hash": "abc"},
    )
    saver.wait()
    return catalog, catalog.read(step)


def safetensors(tensors):
    shapes = {n: Tensor(str(t.dtype).removeprefix("torch."), tuple(t.shape), ()) for n, t in tensors.items()}
    return b"".join(safetensors_file(shapes, tensors.__getitem__, {"step": 7}))


def test_a_safetensors_file_is_read_by_its_own_library(tmp_path):
    tensors = varied([name for name in DTYPES if name != "complex128"])
    (tmp_path / "w.safetensors").write_bytes(safetensors(tensors))
    assert_equal(load_file(tmp_path / "w.safetensors"), tensors)
    with safe_open(tmp_path / "w.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "7"}


def test_a_dtype_that_safetensors_lacks_is_named():
    with pytest.raises(CheckpointError, match=r"complex128.*\n.*\.pt"):
        safetensors(varied())


@pytest.mark.parametrize("ending", ["pt", "pth", "safetensors"])
@pytest.mark.parametrize("workload", [Classify, TiedAndFrozen, WithBatchNorm])
def test_weights_of_a_run_are_imported_and_loaded(tmp_path, ending, workload):
    finished = train_alone(workload(), FLAGS, folder=tmp_path / "run")
    file = str(tmp_path / f"weights.{ending}")
    written(file, finished.weights)
    manifest = import_weights(file, str(tmp_path / "imported"))
    assert manifest.step == 0 and all(name.startswith("model.") for name in manifest.tensors)
    assert (manifest.world_size, manifest.strategy, manifest.values) == (1, "imported", {})
    assert manifest.facts == {"imported_from": file} and manifest.metrics == {}
    assert manifest.bytes_written == sum(stored.num_bytes for stored in manifest.files.values())
    imported = catalog_of(tmp_path / "imported")
    assert imported.check(imported.newest()) == []
    newest = str(tmp_path / "run" / "checkpoints" / "step-000000004")
    for where in (
        str(tmp_path / "imported"),
        str(tmp_path / "run"),
        str(tmp_path / "run" / "checkpoints"),
        newest,
        newest + "/",
    ):
        model = workload().build_model()
        load_weights(model.state_dict(), where)
        assert_equal(model.state_dict(), finished.weights)


def fine_tune(place, folder):
    """Weights of a run on other ranks, under another strategy."""
    from torch.distributed.device_mesh import init_device_mesh

    from scaleray.strategies import STRATEGIES

    job, _ = make_job(Classify())
    model = job.workload.build_model()
    mesh = init_device_mesh("cpu", (place.world_size,), mesh_dim_names=("dp",))
    parallel = STRATEGIES["ddp"](model, mesh, job.config, job.workload)
    load_weights(parallel.module.state_dict(), folder, group=place.group)
    weights = {name: t.clone() for name, t in parallel.module.state_dict().items()}
    parallel.close()
    return weights


def train_in(place, folder):
    return train(place, Classify(), {**FLAGS, "batch.global_size": 12}, folder=folder).weights


@pytest.mark.combination
def test_weights_load_on_another_world_size_and_strategy(gloo, tmp_path):
    weights = gloo.run(2, train_in, str(tmp_path / "run"))[0]
    written(tmp_path / "w.pt", weights)
    import_weights(str(tmp_path / "w.pt"), str(tmp_path / "imported"))
    for where in ("run", "imported"):
        for loaded in gloo.run(3, fine_tune, str(tmp_path / where)):
            assert_equal(loaded, weights)
        alone = Classify().build_model()
        load_weights(alone.state_dict(), str(tmp_path / where))
        assert_equal(alone.state_dict(), weights)


def test_files_of_others_are_imported(tmp_path):
    model = TiedAndFrozen().build_model()
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    torch.save({f"module.{name}": t for name, t in model.state_dict().items()}, tmp_path / "ddp.pt")
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, tmp_path / "nested.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_model(model, str(tmp_path / "tied.safetensors"))  # leaves out one name of the tied pair
    save_file({name: t.clone() for name, t in wanted.items()}, tmp_path / "plain.safetensors")
    files = [path for path in tmp_path.iterdir() if path.suffix]
    assert len(files) == 6
    for file in files:
        import_weights(str(file), str(tmp_path / f"from {file.name}"))
        fresh = TiedAndFrozen().build_model()
        load_weights(fresh.state_dict(), str(tmp_path / f"from {file.name}"))
        assert_equal(fresh.state_dict(), wanted)


class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"linear.weight": torch.zeros(9, 4)}, ["linear.weight", "[9, 3] float32", "[9, 4] float32", "1 of 2"]),
        (
            {"linear.weight": torch.zeros(9, 3, dtype=torch.float64)},
            ["[9, 3] float32", "[9, 3] float64", "wider dtype"],
        ),
        ({"linear.bias": torch.zeros(9, dtype=torch.int32)}, ["linear.bias", "[9] int32"]),
        ({"linear.bias": None}, ["linear.bias", "no such tensor"]),
        ({"another": torch.zeros(2)}, ["another", "missing", "[2] float32", "1 of 3"]),
    ],
)
def test_other_weights_are_refused_in_one_message_and_the_model_stays(tmp_path, change, words):
    model = Wider()
    tensors = {name: t for name, t in {**Wider().state_dict(), **change}.items() if t is not None}
    stored(tmp_path / "run", tensors)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(CheckpointError) as error:
        load_weights(model.state_dict(), str(tmp_path / "run"))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert_equal(model.state_dict(), before)


def test_a_narrower_dtype_is_widened(tmp_path):
    tensors = {"a": torch.randn(3, dtype=torch.bfloat16), "b": torch.randn(2)}
    stored(tmp_path, tensors)
    into = {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)}
    load_weights(into, str(tmp_path))
    assert_equal(into, {"a": tensors["a"].float(), "b": tensors["b"].double()})


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pt", {"w": Harmful()}, "more than tensors"),
        ("a.pt", {"w": torch.ones(1), "steps": 3}, "but contains 'steps': int"),
        ("a.pt", {}, "but contains dict"),
        ("a.pt", [torch.ones(1)], "but contains list"),
        ("a.pt", {3: torch.ones(1)}, "but contains 3: Tensor"),
        ("a.pt", b"", "cannot be read|more than tensors"),
        ("a.pt", b"no archive at all", "more than tensors|cannot be read"),
        ("a.pt", b"PK\x03\x04 but cut", "cannot be read"),
        ("a.safetensors", b"no safetensors", "cannot be read as safetensors"),
        ("a.safetensors", b"", "cannot be read as safetensors"),
        ("a.txt", b"", "must end in"),
        ("nothing.pt", None, "does not exist"),
    ],
)
def test_a_file_that_is_no_state_dict_is_refused_and_nothing_is_left(tmp_path, name, content, words):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / name)
    with pytest.raises(CheckpointError, match=words):
        import_weights(str(tmp_path / name), str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_an_import_overwrites_nothing(tmp_path):
    stored(tmp_path / "run", {"a": torch.ones(3)})
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="already holds checkpoints"):
        import_weights(str(tmp_path / "a.pt"), str(tmp_path / "run"))
    assert snapshot(tmp_path) == before


def test_a_path_means_a_run_its_checkpoints_or_one_of_them(tmp_path):
    run = str(tmp_path / "run")
    expected = Catalog.of_run(run)
    assert Catalog.at(run) == (expected, None)
    assert Catalog.at(f"{run}/") == (expected, None)
    assert Catalog.at(f"{run}/checkpoints") == (expected, None)
    assert Catalog.at(f"{run}/checkpoints/step-000000012") == (expected, 12)
    assert Catalog.at("s3://b/run/checkpoints/step-000000012?scheme=http")[0] == Catalog.of_run(
        "s3://b/run?scheme=http"
    )
    assert Catalog.at(f"{run}/checkpoints/step-000000012", "/copies") == (Catalog.of_run(run, "/copies"), 12)
    lone = Catalog.at("/elsewhere/step-000000012", "/copies")
    assert (lone[0].stores[0].root, lone[1]) == ("/elsewhere", 12)


def test_one_checkpoint_that_was_copied_elsewhere_is_read(tmp_path):
    _, manifest = stored(tmp_path / "run", {"a": torch.ones(3)})
    (tmp_path / "run" / "checkpoints" / manifest.name).rename(tmp_path / manifest.name)
    into = {"a": torch.zeros(3)}
    load_weights(into, str(tmp_path / manifest.name))
    assert into["a"].tolist() == [1, 1, 1]


def test_a_checkpoint_of_other_names_is_no_weights(tmp_path):
    saver = make_saver(catalog_of(tmp_path))
    save(saver, 1, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"model's b is '\[1\] float32'|model's a is missing"):
        load_weights({"b": torch.ones(1)}, str(tmp_path))


def test_weights_that_cannot_be_had_are_explained(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="scaleray checkpoint import"):
        load_weights({}, __file__)
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_weights({}, str(tmp_path / "nowhere"))
    stored(tmp_path / "run", {"a": torch.ones(3)})
    with pytest.raises(CheckpointError, match="step 3 is missing"):
        load_weights({}, str(tmp_path / "run" / "checkpoints" / "step-000000003"))

    def refuse(self, name):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("scaleray.checkpoints.storage.Store.read", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        load_weights({}, str(tmp_path / "run"))
