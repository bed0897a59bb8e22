"""Resolve the targets of alerts on the driver: the webhook's address from the environment, and the command."""

import os
import shutil

from scaleray.config.alerts import AlertSettings, problem_of
from scaleray.errors import ConfigError


def alert_settings(alerts: AlertSettings) -> tuple[AlertSettings, str | None]:
    """The settings for the recorder, and the webhook's address, which may be set only in the driver's environment.
    Raises ConfigError for an unset variable or a missing command.
    """
    address = alerts.webhook
    if alerts.webhook_env is not None:
        address = os.environ.get(alerts.webhook_env, "").strip()
        if not address:
            raise ConfigError("alerts.webhook_env", alerts.webhook_env, "this variable is not set", "export it first")
        if problem := problem_of(address):
            raise ConfigError.problem(
                "alerts.webhook_env",
                f"names {alerts.webhook_env}, whose value cannot be used: {problem}",
                "set it to a URL such as https://host/path",
            )
    command = alerts.command
    if command:
        program = shutil.which(os.path.expanduser(command[0]))
        if program is None:
            raise ConfigError(
                "alerts.command",
                command[0],
                "this machine has no such program",
                "give its full path, with its arguments as further items",
            )
        command = (os.path.abspath(program), *command[1:])  # the recorder has another working directory
    return alerts.model_copy(update={"webhook": None, "command": command}), address
