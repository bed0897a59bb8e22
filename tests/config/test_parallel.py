"""Degrees of parallelism: what is left to the rest, which ranks form a replica, and what does not multiply."""

from __future__ import annotations

import pytest

from scaleray.config import load_config
from scaleray.config.parallel import Degrees, all_degrees
from scaleray.config.recipe.derive import resolve_strategy
from scaleray.errors import ConfigError
from scaleray.launch.run.train import check_degrees

NEEDED = {"workload.name": "m:W", "batch.global_size": 64, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}


def config_of(workers, **values):
    flags = {key.replace("__", "."): value for key, value in values.items()}
    return load_config(flags={**NEEDED, "scale.workers": workers, **flags}, environ={})


@pytest.mark.parametrize(
    ("workers", "values", "strategy", "degrees"),
    [
        (4, {}, "ddp", Degrees(replicate=4)),
        (1, {"parallel__tensor": 2}, "single", Degrees()),
        (4, {"strategy__name": "fsdp"}, "fsdp", Degrees(shard=4)),
        (4, {"parallel__shard": 4}, "fsdp", Degrees(shard=4)),
        (4, {"parallel__shard": 2}, "fsdp", Degrees(replicate=2, shard=2)),
        (4, {"strategy__name": "fsdp", "parallel__replicate": 2}, "fsdp", Degrees(replicate=2, shard=2)),
        (8, {"strategy__name": "tensor"}, "tensor", Degrees(shard=4, tensor=2)),
        (8, {"parallel__tensor": 4, "parallel__replicate": 2}, "tensor", Degrees(replicate=2, tensor=4)),
        (8, {"strategy__name": "pipeline"}, "pipeline", Degrees(pipeline=2, replicate=4)),
        (8, {"strategy__name": "pipeline", "parallel__shard": "auto"}, "pipeline", Degrees(pipeline=2, shard=4)),
        (8, {"parallel__pipeline": "auto", "parallel__tensor": 2}, "pipeline", Degrees(pipeline=4, tensor=2)),
        (4, {"strategy__name": "diloco"}, "diloco", Degrees(replicate=4)),
        (8, {"strategy__name": "diloco", "parallel__shard": 2}, "diloco", Degrees(replicate=4, shard=2)),
        (8, {"strategy__name": "diloco", "parallel__pipeline": 2}, "diloco", Degrees(pipeline=2, replicate=4)),
        (
            16,
            {"parallel__pipeline": 2, "parallel__shard": 2, "parallel__tensor": 2},
            "pipeline",
            Degrees(pipeline=2, replicate=2, shard=2, tensor=2),
        ),
        (8, {"parallel__context": 2}, "ddp", Degrees(replicate=4, context=2)),
        (8, {"parallel__context": 2, "parallel__shard": 2}, "fsdp", Degrees(replicate=2, shard=2, context=2)),
    ],
)
def test_what_is_not_given_is_the_rest_of_the_workers(workers, values, strategy, degrees):
    config = config_of(workers, **values)
    assert (resolve_strategy(config), config.degrees()) == (strategy, degrees)
    assert config.degrees().workers == workers


@pytest.mark.parametrize(
    ("workers", "values", "says"),
    [
        (6, {"parallel__tensor": 4}, "parallel is tensor 4: scale.workers is 6, and must be a multiple of"),
        (
            4,
            {"parallel__tensor": 2, "parallel__pipeline": 2, "parallel__shard": 2, "parallel__replicate": 1},
            r"pipeline 2 x shard 2 x tensor 2: scale.workers is 4, and must be their product, 8.*use --scale.workers 8",
        ),
        (4, {"strategy__name": "ddp", "parallel__shard": 2}, "shard is 2: strategy.name is ddp, which has no such"),
        (4, {"strategy__name": "tensor", "parallel__pipeline": 2}, "pipeline is 2: strategy.name is tensor"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_name(workers, values, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config_of(workers, **values).degrees()


def test_degrees_that_do_not_fit_are_refused_before_a_cluster_is_asked_for_room():
    config = config_of(4, parallel__tensor=2, parallel__pipeline=2, parallel__shard=2)
    with pytest.raises(ConfigError, match="must be a multiple of their product, 8"):
        check_degrees(config)


def test_only_one_degree_is_the_rest():
    with pytest.raises(ConfigError, match="replicate and shard: only one degree can be auto"):
        config_of(4, parallel__shard="auto", parallel__replicate="auto")


@pytest.mark.parametrize("degrees", all_degrees(8))
def test_replicas_are_all_ranks_each_once_with_neighbours_in_a_layer(degrees):
    assert degrees.workers == 8
    assert sorted(rank for replica in degrees.replicas for rank in replica) == list(range(8))
    for data_rank, replica in enumerate(degrees.replicas):
        assert [degrees.data_rank(rank) for rank in replica] == [data_rank] * degrees.model
        parts = [replica[n : n + degrees.tensor] for n in range(0, len(replica), degrees.tensor)]
        assert all(part == list(range(part[0], part[0] + degrees.tensor)) for part in parts)
    shares = degrees.token_shares
    assert sorted(rank for ranks in shares for rank in ranks) == list(range(8))
    assert len(shares) == degrees.data * degrees.context
    for number, ranks in enumerate(shares):
        assert set(ranks) <= set(degrees.replicas[number // degrees.context])


def test_the_workers_are_cut_in_every_way():
    assert len(all_degrees(8)) == 35  # of three factors of 2 over five axes
    assert len(set(all_degrees(12))) == len(all_degrees(12)) == 75
