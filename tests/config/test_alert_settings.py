"""Alerts in the config: unknown rules, addresses that hold a secret, and where such an address must not appear."""

from __future__ import annotations

import json
import shlex

import pytest

from scaleray.config import load_config
from scaleray.config.alerts import AlertSettings, without_secret, without_secrets
from scaleray.config.idle_settings import used_settings
from scaleray.errors import ConfigError

BASE = {"workload.name": "m:V", "batch.global_size": 8, "optimizer.learning_rate": 0.1, "stop.after": "10 steps"}
SECRET = "T0/B1/xyzzy"
HOOK = f"https://hooks.example.com:8443/services/{SECRET}?key={SECRET}"


def with_alerts(**values):
    return load_config(flags={**BASE, **{f"alerts.{key}": value for key, value in values.items()}}, environ={})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"without": ["los_spike"]}, ["alerts.without", "los_spike", "did you mean loss_spike?"]),
        ({"without": ["xyz"]}, ["there is no rule xyz", "the rules are no_progress"]),
        ({"action": {"criticl": "stop"}}, ["alerts.action", "did you mean critical?"]),
        ({"action": {"critical": "halt"}}, ["alerts.action", "'stop', 'checkpoint' or 'none'"]),
        ({"webhook": "hooks.example.com/x"}, ["alerts.webhook", "does not begin with http:// or https://"]),
        ({"webhook": "https:///x"}, ["alerts.webhook", "has no host"]),
        ({"webhook": "https://h/x", "webhook_env": "HOOK"}, ["alerts.webhook_env cannot be combined"]),
        ({"grafana": "grafana:3000"}, ["alerts.grafana", "does not begin with http:// or https://"]),
        (
            {"grafana": "http://me:xyzzy@grafana"},
            ["alerts.grafana", "http://me:***@grafana", "only scheme, host and path"],
        ),
        ({"attempts": 0}, ["alerts.attempts", "greater than or equal to 1"]),
        ({"memory_share": 95}, ["alerts.memory_share", "less than or equal to 1"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(values, words):
    with pytest.raises(ConfigError) as raised:
        with_alerts(**values)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("address", [f"htps://h/{SECRET}", f"https://h:port/{SECRET}", SECRET, f"https://[h/{SECRET}"])
def test_an_address_that_is_refused_is_not_shown(address):
    with pytest.raises(ConfigError) as raised:
        with_alerts(webhook=address)
    assert "xyzzy" not in str(raised.value)


def test_the_secret_of_a_webhook_is_in_nothing_that_is_stored_and_changes_no_hash():
    config = with_alerts(webhook=HOOK)
    assert config.alerts.webhook == HOOK
    assert config.to_dict()["alerts"]["webhook"] == "https://hooks.example.com:8443/***"
    assert "xyzzy" not in json.dumps([config.to_dict(), used_settings(config, "ddp")])
    assert config.hash() == with_alerts().hash()


def test_names_and_passwords_before_the_host_are_hidden_too():
    assert without_secret("https://me:pass@h.example/x") == "https://h.example/***"


def test_a_command_line_is_stored_without_secrets():
    words = [
        "train",
        "--alerts.webhook",
        HOOK,
        "--tracking.uri",
        "http://me:pass@h/",
        f"--alerts.webhook={HOOK}",
        "--seed",
        "1",
    ]
    shown = shlex.join(without_secrets(words))
    assert "xyzzy" not in shown and "pass" not in shown
    assert shown.startswith(
        "train --alerts.webhook 'https://hooks.example.com:8443/***' --tracking.uri"
    ) and shown.endswith("--seed 1")


def test_each_limit_has_a_default_that_alone_is_valid():
    assert AlertSettings() == AlertSettings.model_validate({})
