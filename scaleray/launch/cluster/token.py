"""The token that authorizes requests to Ray: this user's own, in a file that no other user can read."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from scaleray.common.own_folder import own_folder

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Ray's environment variables: the mode (`token` or `disabled`), the token, and the path of the token's file."""


def token_file() -> Path:
    """File in which Ray keeps this user's token; in `own_folder` if the user has no home."""
    try:
        return Path.home() / ".ray" / "auth_token"
    except RuntimeError:
        return _without_home()


def _without_home() -> Path:
    """Replacement for an unwritable `token_file`, which Ray finds through RAY_AUTH_TOKEN_PATH."""
    return own_folder() / "auth_token"


def has_token() -> bool:
    """Whether a client here would find a token; one outside of the home folder must be named by the environment."""
    if any(name in os.environ for name in (TOKEN, TOKEN_PATH)) or token_file().exists():
        return True
    home = token_file().parent.parent
    if (home.is_dir() and os.access(home, os.W_OK)) or not (file := _without_home()).exists():
        return False
    os.environ[TOKEN_PATH] = str(file)
    return True


def is_given() -> bool:
    """Whether the environment names the cluster's token; the user's own token file does not count."""
    return TOKEN in os.environ or os.environ.get(TOKEN_PATH, str(_without_home())) != str(_without_home())


def ensure_token() -> None:
    """Create the token file before Ray, which would let all users read it; fix the mode of an existing file."""
    if os.environ.get(MODE) != "token" or any(name in os.environ for name in (TOKEN, TOKEN_PATH)):
        return
    file = token_file()
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        _make(file)
    except OSError:  # containers run as users without a home, or with one that is read-only
        file = _without_home()
        _make(file)
    if file == _without_home():
        os.environ[TOKEN_PATH] = str(file)
    with contextlib.suppress(OSError):  # somebody else's, whom this user trusts
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            file.chmod(0o600)


def _make(file: Path) -> None:
    with contextlib.suppress(FileExistsError):
        # exclusive: of two commands that start at once, one makes it; a link keeps nobody's file open
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as output:
            output.write(secrets.token_hex(32))  # as long as Ray's own


def headers() -> dict[str, str]:
    """Headers for requests to a dashboard, with this user's token if clients use one."""
    if os.environ.get(MODE) != "token":
        return {}
    token = os.environ.get(TOKEN, "")
    with contextlib.suppress(OSError):
        token = token or Path(os.environ.get(TOKEN_PATH) or token_file()).read_text()
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}
