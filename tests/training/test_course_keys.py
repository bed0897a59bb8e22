"""Every key of the config that decides only the course of a training leaves its result as it is, within rounding."""

import numpy as np
import pytest
from block_runs import TinyTransformer
from small_runs import largest_difference, relative_differences, train
from transformer import TransformerConfig, tensor_plan

from scaleray.config import load_config
from scaleray.config.decides import Decides, decides
from scaleray.records.json_record import leaves

NEEDED = {"workload.name": "m:W", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "1 epoch"}
CHANGED = {
    "batch.micro_size": (2, {}),
    "evaluation.every": ("2 steps", {}),
    "evaluation.micro_size": (3, {}),
    "evaluation.test": ("at_end", {"evaluation.every": "2 steps"}),
    "strategy.name": ("zero1", {}),
    "strategy.bucket_size_mib": (0.001, {}),
    "strategy.gradient_as_bucket_view": (False, {}),
    "strategy.static_graph": (True, {}),
    "strategy.find_unused_parameters": (True, {}),
    "fsdp.reshard_after_forward": (False, {}),
    "parallel.replicate": (2, {"strategy.name": "fsdp", "workers": 4}),
    "fsdp.wrap": ("size", {"fsdp.wrap_min_parameters": 50}),
    "fsdp.wrap_min_parameters": (50, {"fsdp.wrap": "size"}),
    "fsdp.prefetch": (2, {}),
    "fsdp.max_unsharded_gib": (0.001, {}),
    "fsdp.accumulate": ("sharded", {"batch.micro_size": 2}),
    "fsdp.build_gib": (0.001, {}),
    "tensor.sequence_parallel": (False, {}),
    "parallel.shard": (2, {"strategy.name": "pipeline", "workers": 4}),
    "pipeline.schedule": ("gpipe", {}),
    "pipeline.stages_per_worker": (3, {"pipeline.schedule": "interleaved_1f1b", "blocks": 6}),
    "pipeline.split": ("measured", {}),
    "shares.by": ("given", {"shares.speeds": [2.0, 1.0]}),
    "activations.checkpointing": ("full", {}),
    "activations.every": (1, {"activations.checkpointing": "every"}),
    "compilation.what": ("blocks", {"compilation.backend": "aot_eager"}),
    "memory.on_out_of_memory": ("halve", {}),
    "data.chunk_mib": (1.0, {}),
    "data.prefetch_mib": (1.0, {}),
}
"""Another value of a key, and what is set on both sides: keys, `workers` (2) and `blocks` of the model (3)."""
NOT_HERE = {
    "scale.": "which workers there are, tests/strategies; where, and for how long they are awaited",
    "fine_tuning.merge": "what is written at the end, tests/training/setup/test_fine_tuning.py",
    "fsdp.wrap_classes": "named with fsdp.wrap",
    "fsdp.cpu_offload": "needs a GPU",
    "parallel.tensor": "the number of workers of a layer, tests/strategies/test_tensor.py",
    "parallel.context": "needs sequences, tests/strategies/test_shared_sequences.py",
    "context.exchange": "needs sequences, tests/strategies/test_shared_sequences.py",
    "parallel.expert": "needs experts, tests/strategies/test_composed_degrees.py",
    "parallel.pipeline": "the number of workers of a replica, tests/strategies/pipeline",
    "shares.": "parts of shares.by",
    "activations.memory_budget": "needs a compiler",
    "compilation.": "how the same graphs are compiled, tests/training/setup/test_compilation.py",
    "memory.": "the search for a micro-batch, tests/training/step/test_micro_batch_finder.py",
    "data.readers": "tasks of Ray, tests/data",
    "data.reserved_cpus": "of those tasks",
    "data.timeout_s": "a time to wait",
}


class Course(TinyTransformer):
    """The tiny transformer with an evaluation and a plan for each layer."""

    length = 8

    def __init__(self, num_blocks):
        super().__init__(num_rows=20, num_val=6)
        self.num_blocks = num_blocks

    def datasets(self):
        rows = super().datasets()["train"]
        return {"train": rows} | {name: {k: v[:6] for k, v in rows.items()} for name in ("val", "test")}

    def tensor_plan(self, model, *, size, sequence_parallel):
        shape = TransformerConfig(
            vocab_size=self.vocabulary, width=8, num_blocks=self.num_blocks, num_heads=2, ffn_width=8, max_sequence_length=8
        )  # fmt: skip
        return tensor_plan(shape, size=size, sequence_parallel=sequence_parallel)


def trained(place, flags, num_blocks):
    finished = train(place, Course(num_blocks), flags)
    return finished.losses, finished.weights


def test_every_key_of_the_course_is_tried_or_has_its_reason():
    keys = {key for key, _ in leaves(load_config(flags=NEEDED, environ={}).to_dict()) if decides(key) is Decides.COURSE}
    assert not {k for k in keys if k not in CHANGED and not k.startswith(tuple(NOT_HERE))}
    assert not set(CHANGED) - keys


@pytest.mark.always("batch.micro_size", "fsdp.prefetch")
@pytest.mark.parametrize("key", CHANGED)
def test_another_value_is_the_same_training(gloo, key):
    value, both = CHANGED[key]
    section, workers, blocks = key.partition(".")[0], both.get("workers", 2), both.get("blocks", 3)
    name = section if section in ("fsdp", "tensor", "pipeline") else "ddp"
    base = {"strategy.name": name, "stop.after": "2 epochs"} | {k: v for k, v in both.items() if "." in k}
    one_side = {k: v for k, v in base.items() if k != "shares.speeds"}
    losses, weights = gloo.run(workers, trained, one_side, blocks)[0]
    others, other_weights = gloo.run(workers, trained, {**base, key: value}, blocks)[0]
    assert len(losses) == 6 and np.isfinite(losses).all()
    assert max(relative_differences(losses, others)) < 1e-9
    assert largest_difference(weights, other_weights) < 1e-9
