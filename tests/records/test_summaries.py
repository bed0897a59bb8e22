"""The summary of each record, which `--json` prints."""

from __future__ import annotations

import json

from scaleray.cli.output import print_json
from scaleray.records.doctor_record import GREEN, RED, DoctorRecord, Measured, PreflightCheck
from scaleray.records.gate_answer import Check, gate_of
from scaleray.records.gates import GateRecord
from scaleray.records.promotion import Promotion
from tests import study_examples


def test_the_summary_of_gates_has_every_answer_and_what_did_not_pass():
    checks = [
        Check(what="runs", answer="pass", words="5"),
        Check(what="noise", answer="inconclusive", words="too much"),
    ]
    gates = [gate_of("equality", checks[:1]), gate_of("convergence", checks)]
    record = GateRecord(
        answer="inconclusive", gates=gates, run="one", candidates=[], baselines=[], policy={}, notes=[], date=""
    )
    assert record.summary == "equality pass, convergence inconclusive; convergence: noise: too much"


def test_the_summary_of_a_promotion_is_the_version_or_why_there_is_none():
    facts = {"model": "digits", "alias": "champion", "answer": "pass", "gates": {}, "run": "one", "run_id": "1"}
    assert Promotion(**facts, not_passed=[], version=2, was=1).summary == "digits@champion is version 2, was version 1"
    refused = Promotion(**facts, not_passed=["scaling: too slow"])
    assert refused.summary == "scaling: too slow; nothing was promoted: digits@champion is unchanged"


def test_the_summary_of_machines_names_what_is_not_green():
    checks = [
        PreflightCheck(name=n, verdict=v, found=f) for n, v, f in (("clocks", GREEN, "0 s"), ("shm", RED, "64 MiB"))
    ]
    assert DoctorRecord(checks=checks, measured=Measured(nodes=[])).summary.endswith("; red: shm: 64 MiB")


def test_the_summary_of_trainings_studies_and_sweeps_is_what_they_conclude(capsys):
    run, study, sweep = study_examples.run_record(), study_examples.study(), study_examples.sweep()
    assert study.summary == study.curves[0].verdict
    assert run.summary == (
        "validation/accuracy 0.95, target reached: 300 steps; samples/s 5120; validation/accuracy 0.95, validation/loss 0.3"
    )
    assert sweep.summary == " ".join(sweep.words[:2])
    print_json(run.to_dict(), summary=run.summary)
    assert json.loads(capsys.readouterr().out)["summary"] == run.summary
    print_json({})
    assert "summary" not in json.loads(capsys.readouterr().out)
