"""Settings of a run's alerts: rules, thresholds, destinations and actions."""

from __future__ import annotations

import shlex
import urllib.parse
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from scaleray.common.parsing import near_words
from scaleray.config.base import HIDDEN, Count, Positive, Settings, without_password

Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")
Action = Literal["stop", "checkpoint", "none"]

RULES = (
    "no_progress", "worker_lost", "restarts", "run_failed", "run_finished",
    "straggler", "slow_link", "slow_pair", "slower_than_before", "slower_than_predicted", "input_starved",
    "loss_spike", "nonfinite", "loss_scale_collapse", "gradient_explosion",
    "memory_near_limit", "memory_filling", "memory_creeping",
    "disk_nearly_full", "checkpoint_too_old", "recorder_spooling",
    "gpu_idle", "gpu_throttled", "gpu_ecc", "gpu_xid",
)  # fmt: skip
"""Names of the rules, which are defined in `live/rules/`."""
WEBHOOK = "alerts.webhook"


class AlertLimits(Settings):
    """Thresholds of alerts, for the run itself and as defaults in `dashboards/alerts.yaml`."""

    no_progress_s: Positive = 30.0
    """Seconds without a step after which a run makes no progress; `no_progress_steps` must also have passed."""
    no_progress_steps: Positive = 10.0
    """Number of usual step times without a step after which a run makes no progress; `no_progress_s` must also have
    passed."""
    long_phase_s: Positive = 600.0
    """Seconds that an evaluation, a checkpoint, a compilation or the end of the run may take before it counts as no
    progress."""
    straggler_share: Positive = 0.1
    """Share of a step by which a rank must be later than the others to count as late."""
    link_ratio: Positive = 0.7
    """Ratio of the collectives' speed to their usual speed below which links are slow."""
    pair_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Ratio of the slowest link's bandwidth to that of the others below which the link is reported."""
    throughput_ratio: Positive = 0.8
    """Ratio of samples per second to their median over the previous half hour below which a run has become slower."""
    predicted_ratio: Positive = 0.8
    """Ratio of measured to predicted efficiency (study or planner) below which a run is slower than predicted."""
    input_wait_share: Positive = 0.2
    """Share of a step spent waiting for input above which the input is too slow."""
    loss_spike_mads: Positive = 8.0
    """Median absolute deviations above the median of the last 200 losses beyond which a loss is a spike."""
    gradient_factor: Positive = 10.0
    """Ratio of the gradient norm to the median of its last 200 values above which it explodes."""
    loss_scale_drop: Positive = 1024.0
    """Factor by which the loss scale must fall within half an hour to count as collapsed; below 1 it always counts."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the memory limit above which memory is nearly full."""
    memory_full_within_s: Positive = 900.0
    """Seconds below which a rank's memory is filling up: the time until it is full at the growth of the last 40
    seconds."""
    memory_creep_gib: Positive = 1.0
    """GiB by which the minimum memory use must grow in 20 minutes, and at least by a twentieth, to count as a leak."""
    disk_free_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Free share of the run folder's disk below which it is nearly full."""
    checkpoint_intervals: Positive = 2.0
    """Age of the newest checkpoint at which it is too old, in checkpoint intervals, plus the time needed to write
    one."""
    restarts_an_hour: Count = 3
    """Number of worker restarts within an hour that raises the alert."""
    gpu_busy_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of five minutes with activity below which a GPU counts as idle."""
    gpu_throttled_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of five minutes with throttling by power or heat above which a GPU is reported."""


class AlertSettings(AlertLimits):
    """Alerts raised by the run itself, without Prometheus: on the terminal, in MLflow, in the run folder's
    alerts.jsonl, and at the destinations set here."""

    watch: bool = True
    """Evaluate the rules during the run. Steps take no longer."""
    measures_links: bool = True
    """Measure each pair of workers after a step when links are slow, for at most ten seconds and at most every ten
    minutes: collectives cannot show which link is slow."""
    without: tuple[str, ...] = ()
    """Names of rules to disable, such as [loss_spike]."""
    webhook: str | None = None
    """http(s) address to which alerts are posted, with the body of an Alertmanager webhook. Only its host is ever shown
    or stored; a resumed run needs it again, unlike `webhook_env`."""
    webhook_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of an environment variable of the driver with the webhook's address."""
    grafana: str | None = None
    """Address of the Grafana with the dashboards; alerts sent to the webhook and the command link to its panels."""
    command: tuple[str, ...] = ()
    """Command with its arguments, run on the driver's node with the same body on its standard input."""
    timeout_s: Positive = 5.0
    """Timeout in seconds of each attempt of the webhook or the command."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 4
    """Number of attempts to deliver an alert, with pauses of 1, 2, 4, ... seconds between them."""
    least: Severity = "info"
    """Lowest severity that is sent to the webhook and the command."""
    action: dict[str, Action] = Field(default_factory=dict)
    """Further actions of an alert, by rule or severity: stop saves and ends the run, checkpoint saves it, none does
    nothing; such as {nonfinite: stop, critical: checkpoint}. A rule takes precedence over its severity.
    """

    @field_validator("without")
    @classmethod
    def _rules_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in RULES:
                raise ValueError(_unknown(name, RULES))
        return names

    @field_validator("action")
    @classmethod
    def _actions_are_of_rules(cls, actions: dict[str, Action]) -> dict[str, Action]:
        for name in actions:
            if name not in (*RULES, *SEVERITIES):
                raise ValueError(_unknown(name, (*SEVERITIES, *RULES)))
        return actions

    @field_validator("webhook")
    @classmethod
    def _webhook_is_an_address(cls, address: str | None) -> str | None:
        if address is not None and (problem := problem_of(address)):
            raise ValueError(f"{problem}; it must be https://host/path")
        return address

    @field_validator("grafana")
    @classmethod
    def _grafana_is_an_address(cls, address: str | None) -> str | None:
        if address is not None:
            check_grafana(address)
        return address

    @model_validator(mode="after")
    def _one_address(self) -> AlertSettings:
        if self.webhook is not None and self.webhook_env is not None:
            raise ValueError("alerts.webhook and alerts.webhook_env cannot be combined: give only one")
        return self


def without_secrets(words: Iterable[str]) -> list[str]:
    """Words of a command line that are safe to show and store: addresses without passwords, webhooks with only their
    host."""
    found: list[str] = []
    for word in words:
        option, is_one_word, value = word.partition("=")
        if found and found[-1] == f"--{WEBHOOK}":
            found.append(without_secret(word))
        elif is_one_word and option == f"--{WEBHOOK}":
            found.append(f"{option}={without_secret(value)}")
        elif is_one_word and option.startswith("--"):
            found.append(f"{option}={without_password(value)}")
        else:
            found.append(without_password(word))
    return found


def without_secrets_in(command: str) -> str:
    """A command line as text without its secrets; unchanged if it has none."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unmatched quotation mark
        words = command.split()
    shown = without_secrets(words)
    return command if shown == words else shlex.join(shown)


def problem_of(address: str) -> str:
    """Reason why a text cannot be a webhook's address, without the text itself; empty if it can."""
    try:
        parts = urllib.parse.urlsplit(address)
        is_known, host, _ = parts.scheme in ("http", "https"), parts.hostname, parts.port
    except ValueError:
        return "it is not an address"
    if not is_known:
        return "it does not begin with http:// or https://"
    return "" if host else "it has no host"


def check_grafana(address: str) -> None:
    """Raise ValueError if an address cannot be the beginning of links to Grafana."""
    if problem := problem_of(address):
        raise ValueError(f"{problem}; use an address such as http://grafana:3000")
    parts = urllib.parse.urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("it is the beginning of links: give only scheme, host and path")


def without_secret(address: str) -> str:
    """An address that is safe to show and store: only scheme and host, as path, query and user may be secret."""
    if problem_of(address):
        return HIDDEN
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/{HIDDEN}"


def _unknown(name: str, known: Iterable[str]) -> str:
    near = near_words(name, list(known))
    meant = f"did you mean {near[0]}?" if near else f"the rules are {', '.join(known)}"
    return f"there is no rule {name}; {meant}"
