"""What a raylet runs in place of Ray's own worker script, see `worker_template.py`: asks the template for a worker.

A script without imports that take time. It stays as long as the worker that it stands for, as Ray knows both.
"""

import json
import os
import socket
import sys


def main() -> None:
    """Become a fork of the template, or Ray's own script where there is none."""
    about = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "niceness": os.nice(0)}
    content = json.dumps(about).encode()
    try:
        with socket.socket(socket.AF_UNIX) as template:
            template.connect(os.environ["WORKER_TEMPLATE_SOCKET"])
            socket.send_fds(template, [len(content).to_bytes(4, "big")], [0, 1, 2])
            template.sendall(content)
            if template.recv(1):
                template.recv(1)  # ends with the worker
                return
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, os.environ["WORKER_TEMPLATE_ORIGINAL"], *sys.argv[1:]])


if __name__ == "__main__":
    main()
