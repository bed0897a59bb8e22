"""Script that a raylet runs instead of Ray's own worker set-up: it requests a worker from the template of
`worker_template.py`.

The script imports nothing slow. It lives as long as its worker, since Ray watches this process. If the template cannot
make the worker (another interpreter, another language, an activated environment), Ray's own scripts do."""

import json
import os
import shlex
import socket
import sys

CONTEXT, LANGUAGE = "--serialized-runtime-env-context", "--language"


def main() -> None:
    """Become a fork of the template, or run Ray's own scripts if there is none."""
    dynamic = dict(word.split("=", 1) for word in sys.argv[1:] if word.startswith((f"{CONTEXT}=", f"{LANGUAGE}=")))
    arguments = [word for word in sys.argv[1:] if word.partition("=")[0] not in dynamic]
    is_plain = dynamic.get(LANGUAGE, "PYTHON") == "PYTHON" and not arguments[0].startswith("-")
    if is_plain and (place := environment_and_folder(json.loads(dynamic.get(CONTEXT, "{}")))):
        environment, folder = place
        about = {
            "arguments": arguments,
            "environment": environment,
            "folder": folder,
            "niceness": os.nice(0),
            "path": search_path(environment.get("PYTHONPATH", "")),
            "prefix": sys.prefix,
        }
        be_fork(json.dumps(about).encode())
    own_set_up = [os.environ["WORKER_TEMPLATE_ORIGINAL"], *sys.argv[1:]] if dynamic else arguments
    os.execv(sys.executable, [sys.executable, *own_set_up])


def environment_and_folder(context: dict) -> tuple[dict[str, str], str] | None:
    """Environment variables and working directory of a worker. context: its runtime environment, as Ray's agent
    serializes it.

    None if Ray itself must set the worker up.
    """
    variables = context.get("env_vars") or {}
    folder = os.getcwd()
    if context.get("py_executable", sys.executable) != sys.executable or context.get("override_worker_entrypoint"):
        return None
    if any("$" in value for value in variables.values()):
        return None
    match context.get("command_prefix") or []:
        case []:
            pass
        case ["cd", name, "&&"]:  # a working directory, as a shell reads it
            [folder] = shlex.split(name)
        case _:
            return None
    return {**os.environ, **variables}, folder


def search_path(places: str) -> list[str]:
    """Module search path of a process with this PYTHONPATH, without its script's folder."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [*filter(None, places.split(os.pathsep)), *(place for place in sys.path[1:] if place not in before)]


def be_fork(content: bytes) -> None:
    """Request a fork from the template, wait until it ends, and exit. Returns if the template makes none."""
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(os.environ["WORKER_TEMPLATE_SOCKET"])
            socket.send_fds(template, [len(content).to_bytes(4, "big")], [0, 1, 2])
            template.sendall(content)
            if template.recv(1):
                template.recv(1)  # ends with the worker
                sys.exit()
    except OSError:
        pass


if __name__ == "__main__":
    main()
