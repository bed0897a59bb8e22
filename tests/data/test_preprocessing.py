"""A preprocessor: fitted once on the train split, applied wherever rows are read, kept with the run without a pickle."""

from __future__ import annotations

import collections
import json
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import ray.data.preprocessors as rays
from fitted_preprocessors import ROWS, fitted
from small_runs import Classify, rows

import scaleray
from scaleray.data import ArraySource, Padding, ParquetSource, Ragged, load_sources, preprocessing
from scaleray.data.as_source import preprocessor_of
from scaleray.data.plain_state import decoded, encoded
from scaleray.errors import CheckpointError, ClusterError, DataError, RunFailedError, WorkloadError

CITIES = ["Ulm", "Oslo", "Bonn", "Oslo", "Ulm", "Bonn", "Oslo", "Ulm"]


class Standard:
    """Columns less their mean, over their spread, of the rows that it was fitted on."""

    def __init__(self, columns):
        self.columns, self.fits = columns, 0

    def fit(self, rows):
        self.fits += 1
        self.means = {name: rows[name].mean(axis=0) for name in self.columns}
        self.spreads = {name: rows[name].std(axis=0) for name in self.columns}

    def transform(self, rows):
        return {n: (c - self.means[n]) / self.spreads[n] if n in self.columns else c for n, c in rows.items()}


class Counted:
    """Places of words in the sorted list of those that were seen."""

    def __init__(self):
        self.words = set()

    def partial_fit(self, rows):
        self.words |= set(rows["city"].tolist())

    def transform(self, rows):
        places = {word: place for place, word in enumerate(sorted(self.words))}
        return {**rows, "city": np.array([places.get(word, -1) for word in rows["city"]])}


class Base:
    build_model = loss = None
    made = None

    def datasets(self):
        return {"train": rows(26), "val": rows(11, seed=1)}

    def preprocessor(self):
        return self.made


class Standardised(Base):
    made = Standard(["x"])


class Cities(Base):
    made = Counted()

    def datasets(self):
        return {name: {"city": CITIES, "y": np.arange(8.0)} for name in ("train", "val")}


def test_it_is_fitted_once_on_the_train_split_and_applied_to_all():
    workload = Standardised()
    workload.made = Standard(["x"])
    sources = load_sources(workload)
    train, val = sources["train"].read(np.arange(26))["x"], sources["val"].read(np.arange(11))["x"]
    assert workload.made.fits == 1
    assert np.abs(train.mean(axis=0)).max() < 1e-6 and np.abs(train.std(axis=0) - 1).max() < 1e-5
    seen = rows(26)["x"]
    assert np.allclose(val, (rows(11, seed=1)["x"] - seen.mean(axis=0)) / seen.std(axis=0))
    assert sources["val"].describe()["preprocessor"] == "Standard"
    assert preprocessor_of(sources["train"]) is workload.made


def test_a_fitted_one_is_taken_as_it_is():
    fitted = Standard(["x"])
    fitted.fit({"x": np.array([[0.0] * 6, [4.0] * 6])})
    source = load_sources(Standardised(), fitted=fitted)["train"]
    assert np.allclose(source.read(np.arange(3))["x"], (rows(26)["x"][:3] - 2) / 2)
    assert fitted.fits == 1


def test_text_becomes_numbers_on_the_way_in_arrays_and_parquet(tmp_path):
    expected = [2, 1, 0, 1, 2, 0, 1, 2]
    assert load_sources(Cities())["val"].read(np.arange(8))["city"].tolist() == expected
    table = pa.table({"city": CITIES, "y": [1.0, None, *range(6)]})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=3)

    class FromParquet(Cities):
        def datasets(self):
            return {"train": ParquetSource(tmp_path / "rows.parquet")}

        def transform(self, rows, rng):
            return {"city": rows["city"], "y": np.nan_to_num(rows["y"], nan=-1)}

    found = load_sources(FromParquet())["train"].read(np.arange(8))
    assert found["city"].tolist() == expected and found["y"].tolist() == [1, -1, 0, 1, 2, 3, 4, 5]


def test_text_that_nothing_makes_numbers_of_is_refused():
    workload = Cities()
    workload.made = Standard([])
    with pytest.raises(DataError, match="column city is '<U4': columns hold numbers"):
        load_sources(workload)


def with_stats(preprocessor, stats):
    preprocessor.stats_ = stats
    return preprocessor


TABLE = {
    "a": np.arange(4.0), "c": np.array(["x", "y", "z", "x"]), "image": np.ones((4, 2, 2), np.float32),
    "l": Ragged.of([[1], [2, 3], [3], [1]]),
}  # fmt: skip
RAYS = {
    "scaler": lambda: with_stats(rays.StandardScaler(["a"]), {"mean(a)": 1.5, "std(a)": np.float64(2.0)}),
    "bins": lambda: with_stats(rays.UniformKBinsDiscretizer(["a"], bins=2), {"a": np.array([-0.1, 1.5, 3.0])}),
    "one hot": lambda: with_stats(rays.OneHotEncoder(["c"]), {"unique_values(c)": {"x": 0, "y": 1, "z": 2}}),
    "many hot": lambda: with_stats(rays.MultiHotEncoder(["l"]), {"unique_values(l)": {np.int64(i + 1): i for i in range(3)}}),
    "words": lambda: with_stats(rays.CountVectorizer(["c"]), {"token_counts(c)": collections.Counter("xxyz")}),
    "together": lambda: rays.Concatenator(["a"], dtype=np.float32, output_column_name="b"),
    "chain": lambda: rays.Chain(
        with_stats(rays.OrdinalEncoder(["c"]), {"unique_values(c)": {"x": 0, "y": 1, "z": 2}}), rays.Normalizer(["a"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", RAYS)
def test_rays_preprocessors_are_kept_as_data_and_transform_as_before(kind, tmp_path):
    made = RAYS[kind]()
    if kind == "chain":
        made._fitted = True
    preprocessing.save(made, str(tmp_path))
    text = (tmp_path / preprocessing.FILE).read_text()
    assert json.loads(text)["format"] == 1
    again = preprocessing.load(str(tmp_path))
    assert type(again) is type(made) and again.fit_status() == made.fit_status()
    before, after = (preprocessing.apply(p, TABLE, allows_text=True) for p in (made, again))
    assert before.keys() == after.keys() and "image" in after
    for name, column in before.items():
        ours, theirs = (getattr(c, "values", c) for c in (column, after[name]))
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def test_categories_are_kept():
    dtype = pd.CategoricalDtype(["b", "a"], ordered=True)
    assert decoded(json.loads(json.dumps(encoded(dtype, "it")))) == dtype


def test_an_object_of_ones_own_is_opened_with_all_that_it_learned(tmp_path):
    for workload, name in ((Standardised(), "x"), (Cities(), "city")):
        source = load_sources(workload)["train"]
        preprocessing.save(preprocessor_of(source), str(tmp_path))
        again = load_sources(workload, fitted=preprocessing.load(str(tmp_path)))["train"]
        index = np.arange(5)
        assert again.read(index)[name].tobytes() == source.read(index)[name].tobytes()


def test_a_run_without_a_preprocessor_has_none(tmp_path):
    assert preprocessing.load(str(tmp_path)) is None
    assert preprocessor_of(load_sources(type("Plain", (Base,), {"preprocessor": None})())["train"]) is None


def with_function():
    made = Standard([])
    made.function = lambda value: value
    return made


@pytest.mark.parametrize(
    "kept", [with_function, lambda: rays.CountVectorizer(["c"], tokenization_fn=lambda text: [text])]
)
def test_what_is_more_than_data_is_refused_with_its_place(kept, tmp_path):
    with pytest.raises(
        WorkloadError, match=r"the preprocessor's \w+\._?\w*fun\w*|tokenization_fn is a builtins.function"
    ):
        preprocessing.save(kept(), str(tmp_path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ('{"format": 2, "preprocessor": null}', "use a newer scaleray"),
        (
            '{"format": 1, "preprocessor": {"class": "subprocess:Popen", "state": {}}}',
            "not a class that transforms rows",
        ),
        ('{"format": 1, "preprocessor": {"function": "os:system"}}', "not a function of ray.data"),
        (
            '{"format": 1, "preprocessor": {"function": "ray.data.preprocessors.utils:hashlib.sha256"}}',
            "not a function of",
        ),
        ('{"format": 1, "preprocessor": {"class": "no_such_file:X", "state": {}}}', "load its workload first"),
        ('{"format": 1, "preprocessor": {"class": "antigravity:X", "state": {}}}', "no imported module has the name"),
        ('{"format": 1, "preprocessor": {"array": "gASVCwAAAAAAAABLAS4="}}', "cannot be read"),
    ],
)
def test_a_file_of_somebody_else_runs_nothing(content, words, tmp_path):
    (tmp_path / preprocessing.FILE).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        preprocessing.load(str(tmp_path))
    assert "antigravity" not in sys.modules


def test_rays_preprocessors_are_fitted_without_ray_to_what_their_names_say(monkeypatch):
    monkeypatch.setattr(preprocessing, "FITTED_ROWS", 128)  # so that parts are put together
    (standard,) = fitted("standard")
    assert standard["mean(a)"] == pytest.approx(ROWS["a"].mean(), rel=1e-12)
    assert standard["std(a)"] == pytest.approx(ROWS["a"].std(), rel=1e-12)
    assert fitted("least and most") == [
        {"min(a)": ROWS["a"].min(), "max(a)": ROWS["a"].max(), "min(b)": 0.0, "max(b)": 4.0}
    ]
    assert fitted("one hot") == fitted("ordinal") == [{"unique_values(c)": {"x": 0, "y": 1, "z": 2}}]
    assert fitted("words")[0]["token_counts(t)"] == collections.Counter(" ".join(ROWS["t"]).split())
    filled, scaled, _ = fitted("chain")
    assert filled["mean(n)"] == pytest.approx(np.nanmean(ROWS["n"]), rel=1e-12)
    whole = np.where(np.isnan(ROWS["n"]), np.nanmean(ROWS["n"]), ROWS["n"])
    assert scaled["std(n)"] == pytest.approx(whole.std(), rel=1e-12)
    assert not ray.is_initialized()


def test_a_fit_that_asks_for_more_than_there_is_without_ray_says_so():
    class Asking(rays.StandardScaler):
        def _fit(self, dataset):
            dataset.sort("a")

    with pytest.raises(ClusterError, match="its fit needs sort of a Ray Dataset, which is unavailable without Ray"):
        preprocessing.fit(Asking(["a"]), ArraySource(ROWS, allows_text=True))


def test_what_is_no_preprocessor_is_refused():
    workload = Standardised()
    workload.made = 5
    with pytest.raises(WorkloadError, match=r"preprocessor\(\) returned a int: it must return one of ray.data"):
        load_sources(workload)


def test_a_preprocessor_may_make_ragged_columns():
    class Split:
        def transform(self, rows):
            return {"x": [np.arange(n + 1) for n in rows["n"]]}

    class Ends(Base):
        made = Split()
        collate = Padding()

        def datasets(self):
            return {"train": {"n": np.arange(9)}}

    assert load_sources(Ends())["train"].read(np.array([2, 0]))["x"].lengths.tolist() == [3, 1]


class Interrupted(Classify):
    """Standardises its features, and fails in its sixth loss of training unless it is `whole`."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.made, self.losses = whole, Standard(["x"]), 0

    def preprocessor(self):
        return self.made

    def loss(self, model, batch):
        self.losses += 1
        if self.losses > 5 and not self.whole:
            raise ValueError("stumbled")
        return super().loss(model, batch)


@pytest.mark.combination
@pytest.mark.usefixtures("mlflow_database")
def test_a_run_keeps_its_preprocessor_and_a_resumed_one_does_not_fit_it_again(tmp_path):
    config = {
        "workload.name": "test_preprocessing:Interrupted", "batch.global_size": 8, "stop.after": "8 steps",
        "optimizer.learning_rate": 0.1, "checkpoint.every": "1 steps", "checkpoint.storage_path": str(tmp_path),
        "tracking.run_name": "kept", "tracking.system_metrics": False, "tracking.uri": f"sqlite:///{tmp_path}/mlflow.db",
    }  # fmt: skip
    first, second = Interrupted(whole=False), Interrupted(whole=True)
    with pytest.raises(RunFailedError, match="stumbled"):
        scaleray.train(config, first, local=True)
    kept = preprocessing.load(str(tmp_path / "kept"))
    assert first.made.fits == kept.fits == 1
    assert np.array_equal(kept.means["x"], rows(26)["x"].mean(axis=0))
    record = scaleray.train(config, second, local=True, resume=str(tmp_path / "kept"))
    assert record.status == "FINISHED" and second.made.fits == 0
    assert record.data["train"]["preprocessor"] == "Standard"
