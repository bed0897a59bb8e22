"""Which alerts a run raises of itself, from which values on, whom they reach, and what they do."""

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
ACTIONS: tuple[Action, ...] = ("stop", "checkpoint", "none")

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
    """Values from which on alerts are raised: by the run itself, and by default in `dashboards/alerts.yaml`."""

    no_progress_s: Positive = 30.0
    """Seconds without a step from which on a run makes no progress, where they are also `no_progress_steps` steps."""
    no_progress_steps: Positive = 10.0
    """Number of usual step times that must pass without a step as well."""
    long_phase_s: Positive = 600.0
    """Seconds that an evaluation, a checkpoint, a compilation or the run's end may take before it counts as no
    progress."""
    straggler_share: Positive = 0.1
    """Share of a step by which one rank comes later than the others."""
    link_ratio: Positive = 0.7
    """Speed of collectives over their usual one, below which links are slow."""
    pair_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Bandwidth of the slowest link between two ranks over that of the others, below which it is named."""
    throughput_ratio: Positive = 0.8
    """Samples per second over the median of the half hour before, below which a run has become slower."""
    predicted_ratio: Positive = 0.8
    """Ratio of measured to predicted efficiency (study or planner) below which a run is slower than predicted."""
    input_wait_share: Positive = 0.2
    """Share of a step that is spent waiting for input, from which on the input is too slow."""
    loss_spike_mads: Positive = 8.0
    """Median absolute deviations above the median of the last 200 losses, from which on a loss is a spike."""
    gradient_factor: Positive = 10.0
    """Gradient norm over the median of its last 200 values, from which on it explodes."""
    loss_scale_drop: Positive = 1024.0
    """Factor by which a loss scale has fallen in half an hour when it has collapsed; below 1 it always has."""
    memory_share: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of the memory's limit that is in use."""
    memory_full_within_s: Positive = 900.0
    """Seconds in which a rank's memory would be full, at the growth of the last 40 seconds, from which on it fills."""
    memory_creep_gib: Positive = 1.0
    """GiB by which the least memory in use has grown in 20 minutes, where that is a twentieth of it too."""
    disk_free_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the run folder's disk that is still free."""
    checkpoint_intervals: Positive = 2.0
    """Age of the newest checkpoint, in distances between checkpoints, plus the time that one takes to be written."""
    restarts_an_hour: Count = 3
    """Number of times that workers were started again within an hour."""
    gpu_busy_share: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of five minutes in which a GPU did something, below which it is idle."""
    gpu_throttled_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of five minutes in which a GPU was slowed down by power or heat."""


class AlertSettings(AlertLimits):
    """Alerts that a run raises of itself, without Prometheus: on the terminal, in MLflow, in the run folder's
    alerts.jsonl, and where these keys say."""

    watch: bool = True
    """Judge the run while it lives. It costs a step nothing."""
    measures_links: bool = True
    """Measure each pair of workers when links are slow, after a step, for at most ten seconds, and not more often than
    every ten minutes: collectives cannot tell which link it is."""
    without: tuple[str, ...] = ()
    """Names of rules that are not judged, such as [loss_spike]."""
    webhook: str | None = None
    """http(s) address that alerts are posted to, with a body as Alertmanager's. Only its host is ever shown or stored;
    a resumed run needs it again, which `webhook_env` does not."""
    webhook_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    """Name of an environment variable of the driver that holds the address."""
    grafana: str | None = None
    """Address of the Grafana that has the dashboards: what the webhook and the command get leads to its panels."""
    command: tuple[str, ...] = ()
    """Command and its arguments, run on the driver's node with the same body on its standard input."""
    timeout_s: Positive = 5.0
    """Seconds that the webhook or the command may take for one attempt."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 4
    """Number of attempts to deliver an alert, with pauses of 1, 2, 4, ... seconds between them."""
    least: Severity = "info"
    """Least severity that reaches the webhook and the command."""
    action: dict[str, Action] = Field(default_factory=dict)
    """Further actions of an alert, by the rule's name or its severity: stop saves and ends the run, checkpoint saves
    it, none does nothing; such as {nonfinite: stop, critical: checkpoint}. A rule's name counts before its severity.
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
            raise ValueError(f"{problem}; https://host/path is needed")
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
            raise ValueError("alerts.webhook and alerts.webhook_env exclude each other: give one")
        return self


def without_secrets(words: Iterable[str]) -> list[str]:
    """Words of a command line as they may be shown and stored: without passwords in addresses, and of a webhook only
    its host."""
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
    """The same of a command in one text, which stays as it is where it has none."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation mark alone
        words = command.split()
    shown = without_secrets(words)
    return command if shown == words else shlex.join(shown)


def problem_of(address: str) -> str:
    """Reason why a text cannot be the address of a webhook, without the text itself; empty for none."""
    try:
        parts = urllib.parse.urlsplit(address)
        is_known, host, _ = parts.scheme in ("http", "https"), parts.hostname, parts.port
    except ValueError:
        return "it is not an address"
    if not is_known:
        return "it does not begin with http:// or https://"
    return "" if host else "it names no host"


def check_grafana(address: str) -> None:
    """Raise ValueError for what is no address of a Grafana that a link can begin with."""
    if problem := problem_of(address):
        raise ValueError(f"{problem}; such as http://grafana:3000")
    parts = urllib.parse.urlsplit(address)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("links begin with it: give only scheme, host and path")


def without_secret(address: str) -> str:
    """The address as it may be shown and stored: scheme and host. Path, query and name may each be a secret."""
    if problem_of(address):
        return HIDDEN
    parts = urllib.parse.urlsplit(address)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}/{HIDDEN}"


def _unknown(name: str, known: Iterable[str]) -> str:
    near = near_words(name, list(known))
    meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"there is no rule {name}; {meant}"
