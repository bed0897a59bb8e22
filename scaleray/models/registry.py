"""Versions of a model in MLflow's registry, and its aliases.

In MLflow, every user with access can move an alias. When scaleray gives a version an alias, it therefore tags the
version with the time; the alias should name the version with the newest tag."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaleray.errors import TrackingError, UsageError, first_line
from scaleray.recording.find_record import PARENT_TAG
from scaleray.recording.store import check_reachable, open_client, resolve_uri, sqlite_path, without_password

PROMOTION_TAG, STATEMENT_TAG = "scaleray.promotion", "scaleray.statement_sha256"
GIVEN = "scaleray.given."
"""Prefix of a version's tag for an alias. Value: nanoseconds since 1970, and the user who gave it."""
WITHDRAWN = "scaleray.withdrawn."
"""Prefix of a version's tag for a withdrawn alias. Value: nanoseconds since 1970, and the user."""
MODEL_URI = "models:/"
ATTEMPTS = 4
PAGE = 1000
"""Number of runs requested from MLflow at a time."""


@dataclass(frozen=True)
class ModelVersion:
    """A version of a registered model. aliases: aliases that currently name it."""

    model: str
    number: int
    source: str
    run_id: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...] = ()
    created_at_ms: float = 0.0
    """Milliseconds since 1970."""

    @property
    def promotion(self) -> str | None:
        """Id of the promotion that created it; None if it was created in another way."""
        return self.tags.get(PROMOTION_TAG)

    def given_at(self, alias: str) -> int | None:
        """Time at which scaleray last gave it the alias, in nanoseconds since 1970, or None."""
        return self._at(f"{GIVEN}{alias}")

    def is_withdrawn(self, alias: str) -> bool:
        """Whether the alias was withdrawn from it and has not been given again."""
        return (self._at(f"{WITHDRAWN}{alias}") or 0) > (self.given_at(alias) or 0)

    def _at(self, tag: str) -> int | None:
        first = self.tags.get(tag, "").split(" ")[0]
        return int(first) if first.isdigit() else None


@dataclass(frozen=True)
class Named:
    """Name of a version: `models:/NAME@ALIAS` or `models:/NAME/3`, or the same without `models:/`."""

    model: str
    alias: str | None = None
    number: int | None = None

    @classmethod
    def parse(cls, text: str) -> Named:
        """Parse a name. Raises UsageError for text of another form."""
        inside = text.removeprefix(MODEL_URI)
        model, at, alias = inside.rpartition("@")
        if at and model and alias:
            return cls(model, alias=check_alias(alias))
        model, slash, number = inside.rpartition("/")
        if slash and model and number.isdigit():
            return cls(model, number=int(number))
        raise UsageError(
            "the model", text, "it must be NAME@ALIAS or NAME/VERSION", "such as digits@champion or digits/3"
        )

    def __str__(self) -> str:
        return f"{self.model}@{self.alias}" if self.alias else f"{self.model}/{self.number}"


def check_alias(alias: str) -> str:
    """Return the alias. Raises UsageError if MLflow would refuse it."""
    if (
        not re.fullmatch(r"[A-Za-z0-9_\-]{1,255}", alias)
        or alias.lower() == "latest"
        or re.fullmatch(r"[vV]\d+", alias)
    ):
        allowed = "it must have only letters, digits, - and _, and not be latest or v1, v2 ..."
        raise UsageError("the alias", alias, allowed, "such as champion")
    return alias


def last_given(versions: Iterable[ModelVersion], alias: str) -> ModelVersion | None:
    """The version to which scaleray gave the alias last; None if it gave it to none of them."""
    given = [(at, one.number, one) for one in versions if (at := one.given_at(alias)) is not None]
    return max(given, key=lambda found: found[:2])[2] if given else None


class ModelRegistry:
    """The registry behind a tracking URI. MLflow's errors become TrackingErrors."""

    def __init__(self, uri: str | None) -> None:
        self.uri = resolve_uri(uri)
        if self.uri.startswith("sqlite:///") and not sqlite_path(self.uri).exists():
            allowed = "it does not exist"
            raise TrackingError("--uri", without_password(self.uri), allowed, "name the run's database")
        check_reachable(self.uri)
        self.client = open_client(self.uri)

    def versions(self, model: str) -> list[ModelVersion]:
        """All versions of a model, newest first; empty if there is no such model."""
        with self._asking(f"the versions of {model}"):
            if "'" in model:
                return []
            found = self.client.search_model_versions(f"name='{model}'", max_results=10_000)
            aliases = self._aliases(model) if found else {}
        return sorted((_version(one, aliases) for one in found), key=lambda one: -one.number)

    def find(self, named: Named) -> ModelVersion:
        """The named version. Raises TrackingError if there is none."""
        found = self.versions(named.model)
        for one in found:
            if one.number == named.number or (named.alias is not None and named.alias in one.aliases):
                return one
        known = ", ".join([*dict.fromkeys(f"@{alias}" for one in found for alias in one.aliases)]) or "no alias"
        there = f"{named.model} has {len(found)} versions and {known}" if found else "there is no model of this name"
        raise TrackingError(
            "the model", str(named), f"{there} in {without_password(self.uri)}", "scaleray promote creates versions"
        )

    def make(self, model: str, *, source: str, run_id: str, tags: Mapping[str, str], description: str) -> ModelVersion:
        """Create a version with these tags."""
        from mlflow.exceptions import MlflowException

        with self._asking(f"a version of {model}"):
            with contextlib.suppress(MlflowException):  # it exists; anything else will be said by the next call
                self.client.create_registered_model(model, tags={"scaleray.model": "true"})
            made = self.client.create_model_version(
                model, source, run_id=run_id, tags=dict(tags), description=description, await_creation_for=30
            )
        return _version(made, {})

    def give(self, version: ModelVersion, alias: str, *, by: str) -> ModelVersion:
        """Point the alias to a version, and return the version that it then names: concurrent calls agree."""
        with self._asking(f"the alias {alias} of {version.model}"):
            number = str(version.number)
            self.client.set_model_version_tag(version.model, number, f"{GIVEN}{alias}", f"{time.time_ns()} {by}")
            chosen = version
            is_set = 0
            while chosen.number != is_set:
                # whoever comes second moves it to the newest as well, whichever of the two that is
                self._set(version.model, alias, chosen.number)
                is_set, chosen = chosen.number, self.expected(version.model, alias) or version
        return chosen

    def withdraw(self, version: ModelVersion, alias: str, *, by: str) -> None:
        """Record that the alias was withdrawn from a version, so that no rollback chooses it by default."""
        with self._asking(f"the alias {alias} of {version.model}"):
            tag = f"{WITHDRAWN}{alias}"
            self.client.set_model_version_tag(version.model, str(version.number), tag, f"{time.time_ns()} {by}")

    def expected(self, model: str, alias: str) -> ModelVersion | None:
        """The version that the alias should name; None if scaleray never set it."""
        return last_given(self.versions(model), alias)

    def download(self, version: ModelVersion, folder: Path) -> Path:
        """Copy the files of a version to a folder below `folder`."""
        import mlflow.artifacts

        with self._asking(f"the files of {version.model}/{version.number}"):
            return Path(
                mlflow.artifacts.download_artifacts(
                    artifact_uri=version.source, dst_path=str(folder), tracking_uri=self.uri
                )
            )

    def run(self, run_id: str) -> Any:
        """A run in MLflow, including a deleted one, or None."""
        from mlflow.exceptions import MlflowException

        with self._asking(f"the run {run_id}"):
            try:
                return self.client.get_run(run_id)
            except MlflowException as exc:
                if exc.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise

    def runs_beside(self, run_id: str, *, since_ms: float) -> dict[str, str]:
        """Ids and statuses of runs in a run's experiment that began since a time and have finished or failed, newest
        first, without points of studies and trials of sweeps."""
        with self._asking(f"the runs next to {run_id}"):
            experiment = self.client.get_run(run_id).info.experiment_id
            query = f"attributes.status != 'RUNNING' and attributes.start_time >= {int(since_ms)}"
            ended, order, token = [], ["attributes.start_time DESC"], None
            while token != "":
                page = self.client.search_runs([experiment], query, order_by=order, max_results=PAGE, page_token=token)
                ended += [one.info for one in page if PARENT_TAG not in one.data.tags]
                token = page.token or ""
            return {info.run_id: info.status for info in ended if info.status in ("FINISHED", "FAILED")}

    def upload(self, run: Any, folder: Path, place: str) -> str:
        """Copy a folder to the artifacts of an MLflow run, and return its URI for a version."""
        with self._asking(f"the artifacts of {run.info.run_id}"):
            self.client.log_artifacts(run.info.run_id, str(folder), place)
            return f"{run.info.artifact_uri.rstrip('/')}/{place}"

    def _set(self, model: str, alias: str, number: int) -> None:
        for attempt in range(ATTEMPTS):
            try:
                return self.client.set_registered_model_alias(model, alias, str(number))
            except Exception:  # two that give a new alias at the same moment: the database refuses the second
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(0.1 * 2**attempt)

    def _aliases(self, model: str) -> dict[str, int]:
        return {alias: int(number) for alias, number in self.client.get_registered_model(model).aliases.items()}

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except (TrackingError, ModuleNotFoundError):
            raise
        except Exception as exc:  # mlflow, its HTTP client and its database drivers share no base class
            raise TrackingError.problem(
                f"MLflow at {without_password(self.uri)}",
                f": {what} cannot be read or written: {first_line(exc)}",
                "repeat the command once MLflow is available again: it continues where it stopped",
            ) from exc


def _version(found: Any, aliases: Mapping[str, int]) -> ModelVersion:
    number = int(found.version)
    own = tuple(sorted(alias for alias, one in aliases.items() if one == number))
    created = float(found.creation_timestamp or 0)
    return ModelVersion(found.name, number, str(found.source), str(found.run_id), dict(found.tags), own, created)
