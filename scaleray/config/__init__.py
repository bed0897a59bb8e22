"""The config of a run: frozen pydantic models, and the loader that fills them. Imports neither torch nor Ray."""

from scaleray.config.base import Duration, Target
from scaleray.config.loading import known_keys, load_config
from scaleray.config.run import RunConfig

__all__ = ["Duration", "RunConfig", "Target", "known_keys", "load_config"]
