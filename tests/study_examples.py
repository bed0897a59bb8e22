"""A study, a sweep and a training whose figures follow from formulas, for tests of what is shown of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

from scaleray.records.run_record import RunRecord
from scaleray.records.study_record import (
    Conditions,
    Curve,
    CurvePoint,
    Estimate,
    Fit,
    NextDoubling,
    Point,
    StudyRecord,
    ToTarget,
)
from scaleray.records.sweep_record import GoodputPoint, SweepRecord, Trial

NOISE_SCALE, LEAST_STEPS = 300.0, 60.0


def about(value, share=0.03):
    return Estimate(value, value * (1 - share), value * (1 + share))


def conditions():
    node = {"node": "10.0.0.1", "cores": 32, "accelerators": ["H100"] * 4, "workers": [0, 1, 2, 3]}
    return Conditions(
        config_hash="c0ffee12",
        code_hash="beefca4e",
        environment_hash="12ab34cd",
        topology_hash="98fe76dc",
        environment={
            "python": "3.11.7",
            "torch": "2.13.0",
            "ray": "2.60.0",
            "scaleray": "0.1.0",
            "os": {"kernel": "6.1"},
        },
        topology={"nodes": [node, {**node, "node": "10.0.0.2", "workers": [4, 5, 6, 7]}]},
    )


def usl(n, contention=0.03, crosstalk=0.002):
    """Speed-up of the Universal Scalability Law."""
    return n / (1 + contention * (n - 1) + crosstalk * n * (n - 1))


def target_curve(batch, steps, step_time_s):
    """An accuracy that rises to 0.95 in `steps` steps."""
    at = [steps * k / 12 for k in range(1, 13)]
    return [(int(s * batch), s * step_time_s, 0.95 - 0.85 * math.exp(-5 * s / steps)) for s in at]


def point(mode, n, *, step_1=0.24, marks=(), reused_from=None, to_target=False, price=None):
    batch = 512 if mode == "strong" else 128 * n
    step = step_1 / usl(n) if mode == "strong" else step_1 * n / usl(n) / 4
    rng = random.Random(n)
    comm, wait, other = step * min(0.85, (0.02 * (n - 1)) ** 0.7), step * 0.03, step * 0.015
    to = ToTarget(
        is_reached=n < 8,
        steps=200,
        samples=200 * batch,
        time_s=200 * step,
        metric="validation/accuracy",
        value=0.95,
        curve=target_curve(batch, 200, step),
    )
    return Point(
        mode=mode,
        workers=n,
        strategy="ddp",
        global_batch_size=batch,
        micro_batch_size=batch // n if mode == "strong" else 128,
        accumulation_steps=1,
        turns=[[step * rng.gauss(1, 0.02) for _ in range(30)] for _ in range(5)],
        num_warmup_steps=10,
        step_time_s=about(step, 0.02),
        samples_per_s=about(batch / step, 0.02),
        tokens_per_s=None,
        compute_s=step - comm - wait - other,
        exposed_comm_s=comm,
        input_wait_s=wait,
        other_s=other,
        comm_s=2 * comm,
        sent_bytes=4e6 * (n - 1) / n,
        mfu=0.41 - 0.01 * n,
        peak_memory_bytes=int(3.2e9 + 1e8 * n),
        cost_per_million_samples=None if price is None else 1e6 * step / batch * n * price / 3600,
        noise_scale=NOISE_SCALE,
        to_target=to if to_target else None,
        marks=list(marks),
        reused_from=reused_from,
        measured_at=1.8e9,
    )


def curve(mode, sizes, **more):
    points = [point(mode, n, **more) for n in sizes]
    base = points[0]
    measured = []
    for p in points:
        speedup = p.samples_per_s.value / base.samples_per_s.value * base.workers
        measured.append(CurvePoint(point=p, speedup=about(speedup), efficiency=about(speedup / p.workers)))
    last = sizes[-1]
    band = [
        (n, about(usl(n), 0.02 + 0.06 * max(0, n / last - 1)))
        for n in [sizes[0] * 2 ** (k / 4) for k in range(99)]
        if n <= 2 * last
    ]
    gain = usl(2 * last) / usl(last)
    return Curve(
        mode=mode,
        base_workers=sizes[0],
        points=measured,
        best_law="usl",
        fits=[
            Fit(
                law="usl",
                parameters={"contention": about(0.03, 0.2), "crosstalk": about(0.002, 0.4)},
                held_out_error=0.012,
                band=band,
            ),
            Fit(law="amdahl", parameters={"serial_share": about(0.041, 0.3)}, held_out_error=0.034),
        ],
        next_doubling=NextDoubling(
            workers=2 * last, gain=about(gain, 0.06), efficiency=about(usl(2 * last) / 2 / last, 0.06), cost_factor=2.0
        ),
        limit="communication",
        verdict=f"The next doubling to {2 * last} workers would give {gain:.2f}x ({gain * 0.94:.2f} to {gain * 1.06:.2f}) for 2x the cost; "
        "communication is the limit: larger buckets or HSDP.",
    )


def study(*, sizes=(1, 2, 4, 8), modes=("strong", "weak"), name="digits-study", marks=(), price=2.5, **more):
    curves = [curve(mode, list(sizes), marks=marks, price=price, to_target=mode == "strong", **more) for mode in modes]
    return StudyRecord(
        name=name,
        command="scaleray study -c jobs/digits.yaml --world-sizes 1,2,4,8 --mode strong,weak",
        config={"workload": {"name": "digits"}, "batch": {"global_size": 512}, "optimizer": {"learning_rate": 0.1}},
        conditions=conditions(),
        curves=curves,
        price_per_worker_hour=price,
        currency="EUR" if price else "",
        marks=list(marks),
        words=[c.verdict for c in curves],
        noise=[(1000 * k, NOISE_SCALE * (1 - math.exp(-k / 15))) for k in range(1, 60)],
        started_at=1.8e9,
        duration_s=412.0,
        folder="runs/digits-study",
    )


RULES = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}


def trial(number, rule, batch, learning_rate, seed, *, base=64, evaluations=12):
    """Steps to target of McCandlish et al. (2018), worse the further the learning rate is from its best one."""
    best = 0.1 * (1 + NOISE_SCALE / base) / (1 + NOISE_SCALE / batch)
    off = abs(math.log(learning_rate / best))
    rng = random.Random(number)
    common = {
        "number": number,
        "batch_size": batch,
        "rule": rule,
        "learning_rate": learning_rate,
        "optimizer": "sgd",
        "warmup": "100 steps",
        "seed": seed,
        "workers": 2,
        "metric": "validation/loss",
        "settings": {"batch.global_size": batch, "optimizer.learning_rate": learning_rate, "seed": seed},
    }
    if off > 3.5:
        return Trial(**common, status="diverged", error="NonFiniteLossError: the loss became nan at step 3")
    steps = LEAST_STEPS * (1 + NOISE_SCALE / batch) * (1 + off**2) * rng.uniform(0.95, 1.05)
    step_time_s = 0.01 + batch * 2e-5
    is_reached = off < 1.6
    at = [steps * k / evaluations for k in range(1, evaluations + 1)]
    floor = 0.15 + 0.1 * off
    values = [(int(s * batch), s * step_time_s, floor + 2.15 * math.exp(-3 * s / steps)) for s in at]
    return Trial(
        **common,
        status="target reached" if is_reached else "stopped early",
        value=values[-1][2],
        curve=values,
        samples_to_target=int(steps * batch) if is_reached else None,
        time_to_target_s=steps * step_time_s if is_reached else None,
        samples=int(steps * batch),
        training_time_s=steps * step_time_s,
        total_time_s=steps * step_time_s + 0.4,
        samples_per_s=batch / step_time_s,
        noise_scale=NOISE_SCALE * rng.uniform(0.8, 1.2),
        goodput=batch / step_time_s / (1 + batch / NOISE_SCALE),
    )


def goodput(batch):
    speed, efficiency = batch / (0.01 + batch * 2e-5), (NOISE_SCALE + 32) / (NOISE_SCALE + batch)
    return GoodputPoint(
        batch_size=batch,
        samples_per_s=about(speed),
        statistical_efficiency=about(efficiency),
        goodput=about(speed * efficiency, 0.05),
        predicted_steps=LEAST_STEPS * (1 + NOISE_SCALE / batch),
        predicted_samples=LEAST_STEPS * (batch + NOISE_SCALE),
        is_trusted=batch <= 1024,
        is_measured=batch in (32, 128, 512),
    )


def sweep(
    *,
    batches=(32, 64, 128, 256, 512, 1024, 2048),
    rules=tuple(RULES),
    factors=(0.3, 1.0, 3.0),
    seeds=(0, 1),
    name="digits-sweep",
    evaluations=12,
):
    grid = itertools.product(rules, batches, factors, seeds)
    trials = [
        trial(n, rule, batch, 0.1 * (batch / 64) ** RULES[rule] * factor, seed, evaluations=evaluations)
        for n, (rule, batch, factor, seed) in enumerate(grid)
    ]
    return SweepRecord(
        name=name,
        command="scaleray sweep -c jobs/digits.yaml --batch-sizes 32..2048 --rules linear,sqrt,none",
        config={"workload": {"name": "digits"}, "batch": {"global_size": 64}},
        conditions=conditions(),
        metric="validation/loss",
        direction="min",
        target="validation/loss <= 0.3",
        scheduler="asha",
        search="grid",
        trials=trials,
        goodput=[goodput(b) for b in batches],
        words=[
            "Fastest: batch 1024 with learning rate 0.4 (sqrt) reaches the target in 2.1 s.",
            "Cheapest: batch 64 needs 21.8 k samples, the fewest of all; beyond the knee at 256 more samples buy little time.",
            "The linear rule stopped holding at batch 2048; theory puts its end near the noise scale of 300.",
        ],
        started_at=1.8e9,
        duration_s=903.0,
        folder="runs/digits-sweep",
    )


def large_sweep(count=1000):
    """`count` trials with random learning rates and long curves."""
    rng = random.Random(0)
    batches, rules = (32, 64, 128, 256, 512, 1024, 2048), list(RULES)
    trials = []
    for n in range(count):
        rule, batch = rng.choice(rules), rng.choice(batches)
        trials.append(
            trial(
                n, rule, batch, 0.1 * (batch / 64) ** RULES[rule] * 10 ** rng.uniform(-1.2, 1.2), n % 3, evaluations=40
            )
        )
    return dataclasses.replace(sweep(), name="thousand", trials=trials)


def run_record(**more):
    values = {
        "name": "digits-w002",
        "status": "FINISHED",
        "verdict": "target reached",
        "workers": 2,
        "strategy": "ddp",
        "steps": 300,
        "final_loss": 0.21,
        "metrics": {"validation/accuracy": 0.95, "validation/loss": 0.3},
        "samples_per_s": 5120.0,
        "tokens_per_s": None,
        "step_time_s": 0.0125,
        "input_wait_share": 0.02,
        "time_to_first_step_s": 4.0,
        "training_time_s": 3.9,
        "total_time_s": 11.0,
        "peak_memory_bytes": [300 << 20, 310 << 20],
        "nonfinite_steps": 0,
        "sample_order": "shuffled",
        "config": {"seed": 0},
        "config_hash": "c0ffee",
        "derived": {"steps": 300},
        "data": {},
        "environment": {"python": "3.11"},
        "environment_hash": "12ab",
        "tracking_uri": "",
        "experiment_id": "",
        "run_id": "",
        "mlflow_link": "",
        "run_dir": "runs/x",
        "events": ["slow input"],
    }
    return RunRecord(**{**values, **more})


def steps_csv(count):
    rows = [f"{n},{2.3 / n**0.5},64,64,0.1,{1.0 / n},0.0125,0.0003,{n / 28},True,2" for n in range(1, count + 1)]
    header = "step,loss,count,num_samples,learning_rate,grad_norm,step_time_s,input_wait_s,epoch,is_finite,world_size"
    return "\n".join([header, *rows]) + "\n"
