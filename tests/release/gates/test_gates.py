"""What each gate answers, on records with planted faults: nothing passes that lacks its evidence."""

import dataclasses
import math
import time

import numpy as np
import pytest

from scaleray.config.base import Target
from scaleray.errors import ConfigError
from scaleray.records.alert_record import Alert
from scaleray.records.certificate import DATE, Outcome
from scaleray.records.gate_answer import together
from scaleray.records.profile_record import Goodput, RunProfile
from scaleray.records.study_record import Estimate
from scaleray.release.gate.policy_file import policy_of
from scaleray.release.gates.confidence import SUCCESSIVE, Runs, above, power_above, runs_needed_above
from scaleray.release.gates.convergence import Learning, convergence_gate
from scaleray.release.gates.data_fingerprint import fingerprint_gate
from scaleray.release.gates.equality import DAY_S, NamedCertificate, Verified, equality_gate
from scaleray.release.gates.operations import operations_gate
from scaleray.release.gates.policy import (
    ConvergencePolicy,
    EqualityPolicy,
    FingerprintPolicy,
    OperationsPolicy,
    Policy,
    ScalingPolicy,
)
from scaleray.release.gates.scaling import scaling_gate
from tests import recorded_runs, study_examples
from tests.recorded_runs import CONFIG, DATA, ENVIRONMENT, a_run, workers_on

NOW = 1.8e9


def a_certificate(name="verify-1", *, at=NOW - 5 * DAY_S, **more):
    date = time.strftime(DATE, time.localtime(at))
    return NamedCertificate(recorded_runs.a_certificate(date=date, **more), name)


def words_of(result):
    return " | ".join(f"{check.answer}: {check.words}" for check in result.checks)


def test_no_text_of_a_record_looks_like_another_check():
    record = recorded_runs.a_run(status="FAILED", verdict="lost\n  pass  runs finished: all\x1b[2J")
    gate = operations_gate([record], policy=OperationsPolicy())
    words = [check.words for check in gate.checks if "lost" in check.words]
    assert words and not any(set("\n\x1b") & set(text) for text in words)


def test_missing_evidence_never_passes():
    assert together([]) == "inconclusive"
    assert together(["pass", "inconclusive"]) == "inconclusive"
    assert together(["inconclusive", "fail", "pass"]) == "fail"
    run, policy = a_run(), Policy()
    results = [
        fingerprint_gate([run], [], policy=policy.fingerprint),
        equality_gate(Verified.of_run(run), [], policy=policy.equality),
        scaling_gate(None, workers=2, policy=policy.scaling),
        convergence_gate([Learning(100, 0.9)], [], target=Target.parse("a/b >= 1"), policy=policy.convergence),
        operations_gate([run], policy=policy.operations),
    ]
    assert [result.answer for result in results] == ["inconclusive"] * 5


class TestFingerprint:
    def test_runs_of_the_same_code_environment_and_data_pass_although_batches_differ(self):
        baseline = a_run("baseline", config={"batch": {"global_size": 32}, "scale": {"workers": 1}}, workers=1)
        assert fingerprint_gate([a_run()], [baseline], policy=FingerprintPolicy()).answer == "pass"

    @pytest.mark.parametrize(
        ("planted", "named"),
        [
            ({"environment": {"accelerators": {**ENVIRONMENT["accelerators"], "cudnn": 91300}}}, "cudnn is 91300"),
            ({"environment": {"packages": {"torch": "2.14.0", "ray": "2.60.0"}}}, "torch is 2.14.0"),
            ({"environment": {"os": "Linux-6.2"}}, "os is Linux-6.2"),
            ({"environment": {"git": {"commit": "feed", "is_dirty": False}}}, "commit is feed"),
            ({"data": {"train": {**DATA["train"], "sha256": "bb"}}}, "sha256 is bb"),
            ({"config": {"workload": {"name": "jobs/other.py:Digits"}}}, "jobs/other.py"),
        ],
    )
    def test_what_differs_fails_and_is_named(self, planted, named):
        result = fingerprint_gate([a_run(**planted)], [a_run("baseline")], policy=FingerprintPolicy())
        assert result.answer == "fail" and named in words_of(result)

    def test_what_may_differ_by_the_policy_passes(self):
        other = a_run(environment={"accelerators": {**ENVIRONMENT["accelerators"], "cudnn": 91300}})
        policy = FingerprintPolicy(may_differ=("environment.accelerators.cudnn",))
        assert fingerprint_gate([other], [a_run("baseline")], policy=policy).answer == "pass"

    def test_changes_that_no_commit_holds_fail_unless_they_are_allowed(self):
        git = {"commit": "feed", "is_dirty": True, "diff_sha256": "cc"}
        runs = [[a_run(name, environment={"git": git})] for name in ("a", "b")]
        assert "uncommitted changes" in words_of(fingerprint_gate(*runs, policy=FingerprintPolicy()))
        assert fingerprint_gate(*runs, policy=FingerprintPolicy(allow_uncommitted=True)).answer == "pass"

    def test_runs_outside_a_checkout_are_inconclusive(self):
        runs = [[a_run(name, environment={"git": {}})] for name in ("a", "b")]
        assert fingerprint_gate(*runs, policy=FingerprintPolicy()).answer == "inconclusive"

    def test_an_eight_gpu_run_and_a_baseline_of_one_gpu_are_of_one_environment(self):
        of_eight = {**ENVIRONMENT["accelerators"], "names": ["H100"] * 8, "interconnect": "NVLink x18"}
        many = a_run(environment={"accelerators": of_eight}, workers=8)
        assert fingerprint_gate([many], [a_run("baseline", workers=1)], policy=FingerprintPolicy()).answer == "pass"
        other = a_run(environment={"accelerators": {**of_eight, "names": ["L4"] * 8}}, workers=8)
        result = fingerprint_gate([other], [a_run("baseline", workers=1)], policy=FingerprintPolicy())
        assert result.answer == "fail" and "names is ['L4'] and ['H100']" in words_of(result)

    @pytest.mark.parametrize("key", ["driver", "cuda", "cudnn", "nccl"])
    def test_what_workers_ran_on_counts_where_the_driver_has_no_gpu(self, key):
        head = {"accelerators": {}}
        other = {**ENVIRONMENT, "accelerators": {**ENVIRONMENT["accelerators"], key: "another"}}
        same, apart = (a_run(environment=head, workers_told=workers_on(one)) for one in (ENVIRONMENT, other))
        baseline = a_run("baseline", environment=head, workers_told=workers_on(ENVIRONMENT))
        assert fingerprint_gate([same], [baseline], policy=FingerprintPolicy()).answer == "pass"
        result = fingerprint_gate([apart], [baseline], policy=FingerprintPolicy())
        assert result.answer == "fail" and f"{key} is another" in words_of(result)

    def test_gpus_of_which_nothing_was_recorded_are_inconclusive(self):
        told = [{"rank": 0, "device": "cuda:0", "cpu": "EPYC", "accelerators": {}}]
        runs = [a_run(name, environment={"accelerators": {}}, workers_told=told) for name in ("a", "b")]
        result = fingerprint_gate(runs[:1], runs[1:], policy=FingerprintPolicy())
        assert result.answer == "inconclusive" and "driver, cuda, cudnn, nccl were not recorded" in words_of(result)
        allowed = FingerprintPolicy(may_differ=("environment.accelerators",))
        assert fingerprint_gate(runs[:1], runs[1:], policy=allowed).answer == "pass"
        silent = a_run("silent", workers_told=[])
        assert "has no record of its workers" in words_of(
            fingerprint_gate([silent], [silent], policy=FingerprintPolicy())
        )

    def test_a_kernel_of_one_worker_that_is_another_fails(self):
        odd = workers_on(ENVIRONMENT)
        odd[1]["os"] = "Linux-5.4"
        odd[0]["os"] = "Linux-6.1"
        result = fingerprint_gate([a_run(workers_told=odd)], [a_run("baseline")], policy=FingerprintPolicy())
        assert result.answer == "fail" and "os is ['Linux-5.4', 'Linux-6.1']" in words_of(result)

    @pytest.mark.parametrize(
        "facts",
        [
            {"rows": 1437, "hashed": "nothing: items are computed"},
            {"rows": 1437, "sha256": "aa", "hashed": "names and sizes"},
            {"rows": 1437, "sha256": "aa", "hashed": "name and size"},
            {"rows": 1437},
        ],
    )
    def test_data_whose_bytes_nobody_hashed_are_inconclusive_and_the_remedy_is_named(self, facts):
        runs = [a_run(name, data={"train": facts}) for name in ("a", "b")]
        result = fingerprint_gate(runs[:1], runs[1:], policy=FingerprintPolicy())
        (check,) = [check for check in result.checks if check.answer != "pass"]
        assert check.answer == "inconclusive" and "no run hashed the bytes of train of a" in check.words
        assert "fingerprint.may_differ: [data.train]" in check.remedy
        allowed = FingerprintPolicy(may_differ=("data.train",))
        assert fingerprint_gate(runs[:1], runs[1:], policy=allowed).answer == "pass"


class TestEquality:
    def test_a_certificate_of_the_config_the_workers_and_the_environment_passes(self):
        run = a_run(config={"seed": 7, "stop": {"after": "3 epochs"}})
        assert equality_gate(Verified.of_run(run), [a_certificate()], policy=EqualityPolicy(), now=NOW).answer == "pass"

    def test_a_failed_certificate_fails(self):
        bad = a_certificate(passed=False, verdict="not the same training")
        assert equality_gate(Verified.of_run(a_run()), [bad], policy=EqualityPolicy(), now=NOW).answer == "fail"

    @pytest.mark.parametrize(
        ("planted", "named"),
        [
            ({"at": NOW - 100 * DAY_S}, "100 days old"),
            ({"strategies": ("fsdp",)}, "it is of fsdp"),
            ({"world_sizes": (1, 4)}, "it is of 1, 4 workers"),
            ({"bound": 1e-3}, "max_bound"),
            ({"config": {**CONFIG, "optimizer": {"learning_rate": 0.2}}}, "learning_rate is 0.2"),
            ({"environment": {**ENVIRONMENT, "python": "3.11.0"}}, "python is 3.11.0"),
        ],
    )
    def test_a_certificate_of_something_else_does_not_count(self, planted, named):
        result = equality_gate(Verified.of_run(a_run()), [a_certificate(**planted)], policy=EqualityPolicy(), now=NOW)
        assert result.answer == "inconclusive" and named in words_of(result)

    def test_a_certificate_knows_the_hardware_of_its_workers_where_a_head_without_gpus_asked_for_it(self):
        head = {**ENVIRONMENT, "cpu": {"model": "of the head"}, "accelerators": {}}
        run = Verified.of_run(a_run(environment=head, workers_told=workers_on(ENVIRONMENT)))
        other = workers_on({**ENVIRONMENT, "accelerators": {"names": ["L4"]}})
        for workers, answer in ((workers_on(ENVIRONMENT), "pass"), (other, "inconclusive"), ([], "inconclusive")):
            certificate = a_certificate(environment=head, outcomes=[Outcome("ddp", 2, 1, "equal", workers=workers)])
            assert equality_gate(run, [certificate], policy=EqualityPolicy(), now=NOW).answer == answer

    def test_the_newest_certificate_that_belongs_to_the_run_counts(self):
        old, new = a_certificate(passed=False), a_certificate("verify-2", at=NOW - DAY_S)
        other = a_certificate("verify-3", at=NOW, world_sizes=(8,), passed=False)
        assert (
            equality_gate(Verified.of_run(a_run()), [old, other, new], policy=EqualityPolicy(), now=NOW).answer
            == "pass"
        )


class TestScaling:
    def a_study(self, low, high, *, turns=5, marks=()):
        study = study_examples.study(modes=("strong",))
        points = []
        for one in study.curves[0].points:
            point = dataclasses.replace(one.point, turns=[[0.1] * 9] * turns, marks=list(marks))
            points.append(
                dataclasses.replace(one, point=point, efficiency=Estimate((low + high) / 2, low, high))
                if one.point.workers == 4
                else one
            )
        return dataclasses.replace(study, curves=[dataclasses.replace(study.curves[0], points=points)])

    @pytest.mark.parametrize(
        ("low", "high", "answer"), [(0.75, 0.8, "pass"), (0.65, 0.8, "inconclusive"), (0.5, 0.6, "fail")]
    )
    def test_the_whole_interval_decides(self, low, high, answer):
        assert scaling_gate(self.a_study(low, high), workers=4, policy=ScalingPolicy()).answer == answer

    def test_an_efficiency_whose_end_is_at_the_limit_itself_is_not_above_it(self):
        for end, answer in ((0.69999, "inconclusive"), (0.70001, "pass")):
            low = 0.75 * (end / 0.75) ** (1 / SUCCESSIVE)
            (check,) = scaling_gate(self.a_study(low, 1.5 - low), workers=4, policy=ScalingPolicy()).checks
            assert check.answer == answer and check.numbers["low"] == pytest.approx(end)

    def test_where_the_interval_holds_the_limit_power_turns_and_the_command_are_told(self):
        (check,) = scaling_gate(self.a_study(0.68, 0.84), workers=4, policy=ScalingPolicy()).checks
        assert check.answer == "inconclusive" and check.needed_of == "measurements of each size"
        assert check.power is not None and check.power < 0.9
        assert check.runs_needed is not None and check.runs_needed > 5
        assert check.remedy == (
            f"scaleray study -c jobs/digits.yaml --world-sizes 1,2,4,8 --mode strong --repeats {check.runs_needed}"
        )
        (far,) = scaling_gate(self.a_study(0.5, 0.8), workers=4, policy=ScalingPolicy()).checks
        assert far.answer == "inconclusive" and far.runs_needed is None and "no number of measurements" in far.words
        (lucky,) = scaling_gate(self.a_study(0.9, 0.95, turns=1), workers=4, policy=ScalingPolicy()).checks
        assert (lucky.runs_needed, lucky.remedy.rpartition(" ")[2]) == (3, "3")

    def test_turns_as_many_as_are_told_pass_nine_times_of_ten(self):
        noise = Runs(math.log(0.8), 0.1, 5)
        needed, random = runs_needed_above(noise, math.log(0.7)), np.random.default_rng(0)
        assert needed is not None
        drawn = [Runs.of(random.normal(noise.mean, noise.stdev, needed)) for _ in range(2000)]
        passed = sum(above(runs, math.log(0.7))[0] == "pass" for runs in drawn) / len(drawn)
        assert passed == pytest.approx(power_above(noise.repeated(needed), math.log(0.7)), abs=0.02)
        assert 0.88 < passed < 0.97

    def test_an_efficiency_of_one_lucky_turn_is_inconclusive(self):
        result = scaling_gate(self.a_study(0.9, 0.95, turns=1), workers=4, policy=ScalingPolicy())
        assert result.answer == "inconclusive" and "requires 3" in words_of(result)

    def test_emulated_and_oversubscribed_points_say_nothing(self):
        study = self.a_study(0.9, 0.95, marks=["oversubscribed"])
        assert scaling_gate(study, workers=4, policy=ScalingPolicy()).answer == "inconclusive"

    @pytest.mark.parametrize(
        ("sizes", "workers", "named"), [((1, 2, 4), 16, "measured 1, 2, 4 workers"), ((2, 4), 2, "by definition")]
    )
    def test_a_size_that_was_not_measured_beside_another_says_nothing(self, sizes, workers, named):
        study = study_examples.study(modes=("strong",), sizes=sizes)
        result = scaling_gate(study, workers=workers, policy=ScalingPolicy())
        assert result.answer == "inconclusive" and named in words_of(result)

    def test_an_efficiency_counts_from_one_worker_unless_the_policy_says_from_how_many(self):
        study = study_examples.study(modes=("strong",), sizes=(4, 8))
        result = scaling_gate(study, workers=8, policy=ScalingPolicy(min_efficiency=0.1))
        assert result.answer == "inconclusive" and "begins with 4 workers" in words_of(result)
        assert "--world-sizes 1,4,8" in result.checks[0].remedy
        allowed = scaling_gate(study, workers=8, policy=ScalingPolicy(min_efficiency=0.1, base_workers=4))
        assert "relative to 4" in allowed.checks[0].what and allowed.checks[0].words != result.checks[0].words

    def test_one_worker_has_nothing_to_scale_and_is_one_process(self):
        assert scaling_gate(None, workers=1, policy=ScalingPolicy()).answer == "pass"
        assert equality_gate(Verified.of_run(a_run(workers=1)), [], policy=EqualityPolicy()).answer == "pass"


class TestConvergence:
    target = Target.parse("test/accuracy >= 0.97")

    def runs(self, number, *, samples=20_000.0, value=0.975, seed=0, spread=200.0, every=100.0):
        random = np.random.default_rng(seed)
        efforts, values = random.normal(samples, spread, number), random.normal(value, 0.001, number)
        return [Learning(float(a), float(b), every) for a, b in zip(efforts, values, strict=True)]

    def answer(self, candidates, baselines, **policy):
        return convergence_gate(candidates, baselines, target=self.target, policy=ConvergencePolicy(**policy))

    def test_as_good_a_run_passes(self):
        assert self.answer(self.runs(6, seed=1), self.runs(6, seed=2)).answer == "pass"

    def test_a_run_that_needs_more_samples_than_the_margin_fails_with_both_numbers(self):
        result = self.answer(self.runs(6, samples=23_000, seed=1), self.runs(6, seed=2))
        assert result.answer == "fail" and "exceeds the margin of 5 %" in words_of(result)

    def test_a_quietly_worse_value_at_the_end_fails_although_the_target_is_reached_as_soon(self):
        result = self.answer(self.runs(6, value=0.960, seed=1), self.runs(6, seed=2))
        failed = [check.what for check in result.checks if check.answer == "fail"]
        assert failed == ["last value of the metric: not worse, within 0.01"]

    def test_without_repeats_nothing_is_said_and_the_number_of_runs_is(self):
        result = self.answer(self.runs(1, seed=1), self.runs(1, seed=2))
        assert result.answer == "inconclusive" and "requires 5 of each" in words_of(result)
        needed = {check.what: check.runs_needed for check in result.checks}
        assert needed["repeated runs"] == 5
        chance = "not faster than chance explains (MLPerf)"
        mlperf = self.answer(self.runs(1, seed=1), self.runs(1, seed=2), not_faster_than_chance=True)
        result.checks.extend(mlperf.checks)
        assert {check.what: check.runs_needed for check in mlperf.checks}[chance] == 4
        assert all(check.remedy.endswith("scaleray train -c FILE --seed N") for check in result.checks if
                   check.what in ("repeated runs", chance))  # fmt: skip
        assert not any(check.answer == "fail" for check in result.checks)

    def test_noise_that_hides_the_margin_says_how_many_runs_it_takes(self):
        result = self.answer(self.runs(5, spread=1500, seed=1), self.runs(5, spread=1500, seed=2))
        efforts = next(check for check in result.checks if check.what.startswith("samples to the target"))
        assert efforts.answer == "inconclusive" and efforts.power is not None and efforts.power < 0.5
        assert efforts.runs_needed is not None and efforts.runs_needed > 10

    def test_a_candidate_that_misses_the_target_fails_and_such_a_baseline_is_none(self):
        missing = [*self.runs(5, seed=1), Learning(None, 0.9, 100.0)]
        assert self.answer(missing, self.runs(6, seed=2)).answer == "fail"
        assert self.answer(missing, self.runs(6, seed=2), may_miss=1, metric_margin=0.2).answer == "pass"
        assert self.answer(self.runs(6, seed=2), missing).answer == "inconclusive"

    def test_a_candidate_that_failed_has_missed_the_target_and_counts(self):
        failed = Learning(None, math.nan, 100.0, has_finished=False)
        result = self.answer([*self.runs(5, seed=1), failed], self.runs(6, seed=2))
        assert result.answer == "fail" and "5 of 6 candidates reached it; 1 did not finish" in words_of(result)
        assert self.answer([*self.runs(5, seed=1), failed], self.runs(6, seed=2), may_miss=1).answer == "pass"
        nobody = self.answer([failed] * 5, self.runs(6, seed=2), may_miss=5)
        assert nobody.answer == "fail" and "no run of one side has finished" in words_of(nobody)

    def test_a_better_recipe_passes_unless_mlperfs_test_is_asked(self):
        for samples in (19_000, 18_000, 16_000, 15_000):
            assert self.answer(self.runs(6, samples=samples, seed=1), self.runs(6, seed=2)).answer == "pass"
        result = self.answer(self.runs(6, samples=15_000, seed=1), self.runs(6, seed=2), not_faster_than_chance=True)
        failed = [check.what for check in result.checks if check.answer == "fail"]
        assert failed == ["not faster than chance explains (MLPerf)"]

    @pytest.mark.parametrize(("metric", "worse"), [("test/loss min", 0.3), ("test/f1 max", 0.1)])
    @pytest.mark.parametrize("target", ["test/accuracy >= 0.97", "test/error <= 0.03", None])
    def test_a_metric_is_judged_in_its_own_direction_whatever_the_target(self, metric, worse, target):
        target = None if target is None else Target.parse(target)
        sides = [self.runs(6, value=value, seed=1) for value in (0.2, worse)]
        answers = [
            [check.answer for check in convergence_gate(*pair, target=target, policy=ConvergencePolicy(metric=metric)).checks
             if check.what.startswith("last value")]
            for pair in (sides, sides[::-1])
        ]  # fmt: skip
        assert answers == [["pass"], ["fail"]]

    @pytest.mark.parametrize("metric", ["test/loss", "test/loss less", "min", "test/loss  min", ""])
    def test_a_metric_without_its_direction_is_refused(self, metric):
        with pytest.raises(ConfigError, match="test/loss min"):
            policy_of({"convergence": {"metric": metric}}, where="given")

    def test_asked_for_equal_what_is_better_by_the_margin_fails_as_well(self):
        fast = self.runs(6, samples=15_000, seed=1)
        result = self.answer(fast, self.runs(6, seed=2), ask_for="equal")
        assert result.answer == "fail"

    def test_evaluations_further_apart_than_half_the_margin_are_too_coarse(self):
        coarse = [dataclasses.replace(run, every_samples=800.0) for run in self.runs(6, seed=1)]
        result = self.answer(coarse, self.runs(6, seed=2))
        assert result.answer == "inconclusive" and "800 samples apart" in words_of(result)

    def test_where_less_is_better_a_higher_loss_is_worse(self):
        target = Target.parse("test/loss <= 0.3")
        worse = [dataclasses.replace(run, value=0.35) for run in self.runs(6, seed=1)]
        same = [dataclasses.replace(run, value=0.30) for run in self.runs(6, seed=2)]
        assert convergence_gate(worse, same, target=target, policy=ConvergencePolicy()).answer == "fail"
        assert convergence_gate(same, same, target=target, policy=ConvergencePolicy()).answer == "pass"


class TestOperations:
    def a_profile(self, productive=90.0, **more):
        goodput = Goodput(100.0, {"productive": productive, "start": 100.0 - productive}, **more)
        return RunProfile(buckets=None, ranks=[], closes=True, gap=None, goodput=goodput)  # type: ignore[arg-type]

    def ask(self, *runs, alerts=(), endured=(), **policy):
        runs = runs or [a_run()]
        return operations_gate(runs, [alerts] * len(runs), policy=OperationsPolicy(**policy), endured=endured)

    def test_a_run_that_finished_without_alerts_passes(self):
        assert self.ask().answer == "pass"

    @pytest.mark.parametrize(
        ("run", "alerts", "policy"),
        [
            ({"status": "FAILED"}, [], {}),
            ({"nonfinite_steps": 3}, [], {}),
            ({}, [Alert("loss spike", "critical", "firing", 0.0, 9.0, "it rose")], {}),
            ({"profile": {"longest_without_checkpoint_s": 700.0}}, [], {"max_checkpoint_interval_s": 600}),
            ({"peak_memory_bytes": [75, 79], "memory": [{"device_bytes": 80}] * 2}, [], {"min_memory_headroom": 0.05}),
        ],
    )
    def test_each_fault_fails_and_so_does_that_of_a_second_candidate(self, run, alerts, policy):
        if "profile" in run:
            run = {"profile": self.a_profile(**run["profile"])}
        well = a_run("well", peak_memory_bytes=[1, 2], memory=[{"device_bytes": 80}] * 2,
                     profile=self.a_profile(longest_without_checkpoint_s=1.0))  # fmt: skip
        bad = a_run("bad", **run)
        assert self.ask(bad, alerts=alerts, **policy).answer == "fail"
        second = operations_gate([well, bad], [[], alerts], policy=OperationsPolicy(**policy))
        assert second.answer == "fail" and "bad" in words_of(second)
        assert self.ask(well, well, **policy).answer == "pass"

    def test_goodput_is_held_against_the_policy_by_its_interval_over_the_candidates(self):
        def asked(*shares):
            runs = [a_run(f"run{n}", profile=self.a_profile(share)) for n, share in enumerate(shares)]
            result = self.ask(*runs, min_goodput=0.8)
            return next(check for check in result.checks if check.what.startswith("goodput"))

        assert asked(90.0, 91.0, 89.0).answer == "pass"
        assert asked(70.0, 71.0, 69.0).answer == "fail"
        unsure = asked(95.0, 70.0, 85.0)
        assert unsure.answer == "inconclusive" and "the interval contains 0.8" in unsure.words
        assert unsure.power is not None and unsure.power < 0.9 and unsure.runs_needed is not None
        assert unsure.runs_needed > 3
        one = asked(90.0)
        assert one.answer == "inconclusive" and "0.9 in a single run" in one.words and one.runs_needed == 2

    def test_faults_survived_are_those_of_finished_runs_that_went_on(self):
        went_on = a_run("killed", resumed_after=[50])
        twice = a_run("twice", resumed_after=[50], profile=self.a_profile(attempts=3))
        assert self.ask(min_faults_survived=1).answer == "inconclusive"
        assert self.ask(went_on, min_faults_survived=1).answer == "pass"
        assert self.ask(endured=[went_on], min_faults_survived=1).answer == "pass"
        assert self.ask(endured=[went_on], min_faults_survived=2).answer == "inconclusive"
        assert self.ask(endured=[twice], min_faults_survived=2).answer == "pass"
        lost = dataclasses.replace(went_on, status="FAILED")
        assert self.ask(endured=[lost], min_faults_survived=1).answer == "inconclusive"

    def test_an_alert_of_the_record_that_the_file_lacks_fails(self):
        began = dataclasses.asdict(Alert("loss spike", "warning", "firing", 5.0, 9.0, "it rose"))
        run = a_run(alerts=[began])
        assert self.ask(run, alerts=[Alert(**began)]).answer == "pass"
        for planted in ([], [dataclasses.replace(Alert(**began), severity="info")]):
            result = self.ask(run, alerts=planted)
            assert result.answer == "fail" and "alerts.jsonl lacks alerts of the record: loss spike" in words_of(result)

    @pytest.mark.parametrize(
        "policy",
        [
            {"min_goodput": 0.5},
            {"min_memory_headroom": 0.1},
            {"max_checkpoint_interval_s": 60},
            {"min_faults_survived": 1},
        ],
    )
    def test_what_was_not_measured_is_inconclusive(self, policy):
        run = a_run(peak_memory_bytes=[1, 2], memory=[{"device_bytes": None}] * 2)
        well = a_run("well", peak_memory_bytes=[1, 2], memory=[{"device_bytes": 80}] * 2,
                     profile=self.a_profile(longest_without_checkpoint_s=1.0))  # fmt: skip
        assert self.ask(run, **policy).answer == "inconclusive"
        assert self.ask(well, run, **policy).answer == "inconclusive"
