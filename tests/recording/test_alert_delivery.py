"""Webhooks and commands that are slow, away or broken: tried a bounded number of times, said once, never waited for."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from receiver import receiving
from waiting import wait_until

from scaleray.live.run_alerts import MOST_WAITING, Delivery, DeliveryError, to_command, to_webhook, webhook_named

BODY = json.dumps({"status": "firing", "alerts": []}).encode()
SECRET = "T0/B1/xyzzy"


class Told:
    """A delivery that pauses without waiting, and what it said."""

    def __init__(self, send, *, name="alerts.webhook (http://h/***)", attempts=4):
        self.said, self.pauses = [], []
        self.delivery = Delivery(name, send, attempts=attempts, say=self.said.append, pause=self.pause)

    def pause(self, seconds):
        self.pauses.append(seconds)
        return False

    def deliver(self, *names):
        for name in names:
            self.delivery.put(name, BODY)
        self.delivery.close(60)


def test_a_receiver_that_answers_500_is_tried_so_often_with_longer_and_longer_pauses_and_said_once():
    with receiving([500]) as receiver:
        told = Told(to_webhook(receiver.url(f"/{SECRET}"), timeout_s=20))
        told.deliver("loss_spike", "nonfinite")
    assert len(receiver.bodies) == 8 and told.pauses == [1, 2, 4, 1, 2, 4]
    assert told.said == [
        "alert loss_spike was not delivered to alerts.webhook (http://h/***): HTTP status 500 (attempt 4 of 4); "
        "it is in alerts.jsonl of the run's folder"
    ]


def test_a_moment_of_500_costs_nothing_but_another_attempt():
    with receiving([500, 503, 200]) as receiver:
        told = Told(to_webhook(receiver.url(), timeout_s=20))
        told.deliver("loss_spike")
    assert len(receiver.bodies) == 3 and told.said == [] and receiver.bodies[0] == json.loads(BODY)


def test_an_answer_that_will_not_change_is_asked_for_once():
    with receiving([404]) as receiver:
        told = Told(to_webhook(receiver.url(), timeout_s=20))
        told.deliver("loss_spike")
    assert len(receiver.bodies) == 1 and "HTTP status 404 (attempt 1 of 4)" in told.said[0]


def test_too_many_requests_is_an_answer_that_changes():
    with receiving([429, 200]) as receiver:
        told = Told(to_webhook(receiver.url(), timeout_s=20))
        told.deliver("loss_spike")
    assert len(receiver.bodies) == 2 and told.said == []


def test_a_redirection_is_not_followed():
    with receiving([302]) as receiver:
        told = Told(to_webhook(receiver.url(), timeout_s=20))
        told.deliver("loss_spike")
    assert receiver.paths == ["/"] and "HTTP status 302" in told.said[0]


def test_a_receiver_that_does_not_answer_is_given_up():
    with receiving([None]) as receiver:
        told = Told(to_webhook(receiver.url(f"/{SECRET}"), timeout_s=0.2), attempts=2)
        told.deliver("loss_spike")
    assert len(receiver.bodies) == 2 and "no answer within 0.2 s (attempt 2 of 2)" in told.said[0]


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{}/" + SECRET, "http://[::1]:{}/" + SECRET, "http://no.invalid/" + SECRET]
)
def test_a_receiver_that_is_away_is_said_without_its_address(address):
    with receiving() as receiver:
        port = receiver.port
    address = address.format(port)
    told = Told(to_webhook(address, timeout_s=20), name=webhook_named(address), attempts=1)
    told.deliver("loss_spike")
    assert "the connection failed: " in told.said[0] and "xyzzy" not in told.said[0] and "/***)" in told.said[0]


@pytest.mark.parametrize("address", ["http://h\nx/" + SECRET, "http://h:99999/" + SECRET, "http://h x/" + SECRET])
def test_an_address_that_cannot_be_is_said_without_it(address):
    with pytest.raises(DeliveryError) as raised:
        to_webhook(address, timeout_s=1)(BODY)
    assert "xyzzy" not in str(raised.value)


def test_after_a_success_a_failure_is_said_again():
    answers = iter([DeliveryError("x"), None, DeliveryError("y")])

    def send(body):
        if (answer := next(answers)) is not None:
            raise answer

    told = Told(send, attempts=1)
    told.deliver("a", "b", "c")
    assert [text.removeprefix("alert ")[0] for text in told.said] == ["a", "c"]


def test_whoever_raises_alerts_never_waits_and_too_many_are_left_out():
    begun, release, sent = threading.Event(), threading.Event(), []

    def send(body):
        begun.set()
        release.wait()
        sent.append(body)

    told = Told(send)
    told.delivery.put("first", BODY)
    begun.wait(60)
    for number in range(MOST_WAITING + 20):
        told.delivery.put(f"a{number}", BODY)
    assert f"{MOST_WAITING} others are already waiting" in told.said[0] and len(told.said) == 1
    told.delivery.close(0.0)  # the end of a run does not wait for ever either
    release.set()
    wait_until(lambda: not told.delivery._thread.is_alive(), seconds=60)
    assert len(sent) == 1


def test_a_command_reads_the_body_on_its_standard_input(tmp_path):
    out = tmp_path / "body.json"
    code = f"import sys, pathlib; pathlib.Path({str(out)!r}).write_bytes(sys.stdin.buffer.read())"
    told = Told(to_command([sys.executable, "-c", code], timeout_s=60))
    told.deliver("loss_spike")
    assert out.read_bytes() == BODY and told.said == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            [sys.executable, "-c", "import sys; sys.exit('no such channel')"],
            "the command exited with code 1: no such channel (attempt 2 of 2)",
        ),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "the command did not finish within 0.3 s"),
        (["/no/such/program"], "the command could not be run: No such file or directory (attempt 1 of 2)"),
    ],
)
def test_a_command_that_fails_is_said_with_its_last_words(command, why):
    told = Told(to_command(command, timeout_s=0.3 if "sleep" in command[-1] else 60), name="alerts.command", attempts=2)
    told.deliver("loss_spike")
    assert told.said[0].startswith("alert loss_spike was not delivered to alerts.command:") and why in told.said[0]
