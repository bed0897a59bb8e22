"""State that a loss carries from batch to batch, such as a recurrent network's, for truncated backpropagation through
time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from scaleray.common.callbacks import Callback
from scaleray.errors import WorkloadError

LANE, PLACE = "lane", "place"
IS_TRIED = ContextVar("is_tried", default=False)
"""Whether passes are only trials with arbitrary rows."""
State = Mapping[str, torch.Tensor]


class _Lanes:
    """State of each lane after its last row and before it; place: number of that row; passes: how often the lane has
    started."""

    def __init__(self, fresh: State, lanes: int) -> None:
        self.after = {name: value.new_zeros((lanes, *value.shape[1:])) for name, value in fresh.items()}
        self.before = {name: value.clone() for name, value in self.after.items()}
        device = next(iter(self.after.values())).device
        self.place, self.passes = torch.zeros(2, lanes, dtype=torch.int64, device=device).unbind()
        self.num_apart = torch.zeros((), dtype=torch.int64, device=device)

    def tensors(self) -> dict[str, Any]:
        return {"after": self.after, "before": self.before, PLACE: self.place, "passes": self.passes}

    def load(self, tensors: Mapping[str, Any]) -> None:
        for own, value in ((self.place, tensors[PLACE]), (self.passes, tensors["passes"])):
            own.copy_(value)
        for own_states, states in ((self.after, tensors["after"]), (self.before, tensors["before"])):
            for name, state in own_states.items():
                state.copy_(states[name])


class CarriedState(Callback):
    """State by lane: each row gets the state that the previous row of its lane left; `callbacks()` must return this
    object.

    initial: function of the model and a number of rows, which returns the state of rows that begin a lane: tensors by
    name, with the rows along dimension 0. lanes: number of lanes, as in `TokenSource(lanes=...)`, whose rows contain
    their lane and their position in it. A lane begins with its first row, in each epoch and each evaluation;
    evaluations have a separate state. Checkpoints store the state of training.
    """

    def __init__(self, initial: Callable[[nn.Module, int], State], *, lanes: int) -> None:
        self.initial, self.lanes = initial, lanes
        self._training: _Lanes | None = None
        self._evaluation: _Lanes | None = None
        self._restored: Mapping[str, Any] = {}
        self._is_running = False

    def of(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the state before the batch's rows, detached from gradients."""
        lane = batch.get(LANE)
        fresh = {name: value.detach() for name, value in self.initial(model, _num_rows(batch)).items()}
        if lane is None or self._is_tried(model):
            return fresh
        there, place = self._of_mode(model, fresh), batch[PLACE]
        last, is_known = there.place[lane], there.passes[lane] > 0
        begins, goes_on, is_again = place == 0, is_known & (place == last + 1), is_known & (place == last)
        there.num_apart += (~(begins | goes_on | is_again)).sum()
        if lane.device.type == "cpu":  # do not wait for a GPU between steps
            there.num_apart += len(lane) - len(lane.unique())
            self._check(there)
        found = {}
        for name, value in fresh.items():
            shape = (-1, *[1] * (value.ndim - 1))
            carried = torch.where(is_again.view(shape), there.before[name][lane], there.after[name][lane])
            found[name] = torch.where((begins | ~is_known).view(shape), value, carried.to(value.dtype))
        return found

    def keep(self, model: nn.Module, batch: Mapping[str, Any], before: State, after: State) -> None:
        """Store the state after the batch's rows. before: the state returned by `of` for them."""
        lane = batch.get(LANE)
        if lane is None or self._is_tried(model):
            return
        with torch.no_grad():
            there = self._of_mode(model, before)
            for name, value in before.items():
                if name not in after or after[name].shape != value.shape:
                    shown = "missing" if name not in after else f"of shape {list(after[name].shape)}"
                    wanted = f"it must have the shape {list(value.shape)}, as before the batch"
                    raise WorkloadError(f"the state {name} after a batch", shown, wanted)
                there.before[name][lane] = value.to(there.before[name].dtype)
                there.after[name][lane] = after[name].detach().to(there.after[name].dtype)
            there.passes[lane] += (batch[PLACE] == 0).long() * (there.place[lane] != 0) + (there.passes[lane] == 0)
            there.place[lane] = batch[PLACE]

    def on_begin(self, run: Any) -> None:
        self._is_running, self._training, self._evaluation = True, None, None

    def on_evaluation(self, run: Any) -> None:
        if self._evaluation is not None:
            self._check(self._evaluation)
        self._evaluation = None

    def on_checkpoint(self, run: Any) -> None:
        if self._training is not None:
            self._check(self._training)

    def on_end(self, run: Any) -> None:
        self.on_checkpoint(run)
        self._is_running = False

    def state_dict(self) -> dict[str, Any]:
        return self._training.tensors() if self._training is not None else dict(self._restored)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored, self._training, self._is_running = state, None, False

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load each lane's state from the worker that is furthest ahead in it."""
        states = [state for state in states if state]
        if not states:
            return
        age = torch.stack([state["passes"] * 2**32 + state[PLACE] for state in states])
        furthest, lanes = age.argmax(0), torch.arange(age.shape[1])
        merged = lambda parts: torch.stack(parts)[furthest, lanes]
        restored = {
            "after": {n: merged([s["after"][n] for s in states]) for n in states[0]["after"]},
            "before": {n: merged([s["before"][n] for s in states]) for n in states[0]["before"]},
            PLACE: merged([s[PLACE] for s in states]),
            "passes": merged([s["passes"] for s in states]),
        }
        self.load_state_dict(restored)

    def _is_tried(self, model: nn.Module) -> bool:
        """Whether the pass is only a trial, with arbitrary rows."""
        return IS_TRIED.get() or (model.training and not self._is_running)

    def _of_mode(self, model: nn.Module, fresh: State) -> _Lanes:
        """Lanes of training or of the current evaluation."""
        if not model.training:
            self._evaluation = self._evaluation or _Lanes(fresh, self.lanes)
            return self._evaluation
        if self._training is None:
            self._training = _Lanes(fresh, self.lanes)
            if self._restored:
                self._training.load(self._restored)
        return self._training

    def _check(self, lanes: _Lanes) -> None:
        if int(lanes.num_apart):
            raise _apart()


def _apart() -> WorkloadError:
    return WorkloadError.problem(
        "the rows of a batch",
        "are not the next rows of their lanes: each worker continues its own lanes",
        "set data.shuffle false, and batch.global_size and the batches of evaluations (evaluation.micro_size times the "
        "workers) to the number of lanes or a divisor of it",
    )


def _num_rows(batch: Mapping[str, Any]) -> int:
    return len(next(iter(batch.values())))
