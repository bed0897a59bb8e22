import sys; sys.path[:0]=["/work/w-model/jobs"]
import pytest, torch
from small_runs import *
import numpy as np

from language_model import LanguageModel

class Lm(LanguageModel):
    def __init__(self, num_rows=26, **kw):
        super().__init__(sequence_length=8, width=16, num_blocks=4, num_heads=2, ffn_width=32, **kw)
        self.config = dataclasses.replace(self.config, vocab_size=32)
        self.num_rows = num_rows
    def datasets(self):
        return {"train": {"tokens": np.random.default_rng(0).integers(0, 32, size=(self.num_rows, 9))}, "val": {"tokens": np.random.default_rng(1).integers(0, 32, size=(6, 9))}}
def check(gloo, n, wl, recipe, flags):
    fin = gloo.run(n, train, wl, {**recipe, **flags})[0]
    plain = train_in_plain_torch(wl, recipe)
    print([max(relative_differences(plain.losses, fin.losses)), max(relative_differences(plain.grad_norms, fin.grad_norms)), largest_difference(plain.weights, fin.weights)])
    print(fin.events)
    print(fin.steps[-1].more, fin.evaluations)
    assert list(fin.weights)==list(plain.weights)
    assert max(relative_differences(plain.losses, fin.losses))<1e-9
    assert max(relative_differences(plain.grad_norms, fin.grad_norms))<1e-9
    assert largest_difference(plain.weights, fin.weights)<1e-9
    return fin
R={"batch.micro_size": 2, "optimizer.name": "adamw", "optimizer.learning_rate": 0.01, "optimizer.clip_norm": 0.5}
@pytest.mark.parametrize("tie",[True,False])
@pytest.mark.parametrize("schedule", ["1f1b","zero_bubble"])
def test_pipe(gloo, tie, schedule):
    check(gloo, 4, Lm(tie_head=tie), R, {"strategy.name":"pipeline","pipeline.schedule":schedule})
def test_ev(gloo):
    fin=check(gloo, 2, Lm(), R, {"strategy.name":"pipeline"})
    ddp=gloo.run(1, train, Lm(), R)[0]
    print(ddp.evaluations)
@pytest.mark.parametrize("tie",[True,False])
@pytest.mark.parametrize("sp",[True,False])
@pytest.mark.parametrize("world",[2,4])
def test_tensor(gloo, tie, sp, world):
    check(gloo, world, Lm(tie_head=tie), R, {"strategy.name":"tensor", "tensor.sequence_parallel": sp})
