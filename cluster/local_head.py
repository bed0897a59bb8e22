"""A Ray head on this machine to submit jobs to: own ports, loopback only, gone with Ctrl-C, SIGTERM or its terminal.

    python cluster/local_head.py --cpus 4

It prints what to export in another terminal, so that `ray job submit` and `scaleray train` find it.
"""

from __future__ import annotations

import argparse
import contextlib
import signal

import psutil

from scaleray.guarded import ending_like_ctrl_c
from scaleray.launch.cluster.head import local_head


def main() -> None:
    """Start the head and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpus", type=int, default=(psutil.cpu_count() or 1) + 1, help="CPUs that Ray hands out")
    cpus = parser.parse_args().cpus
    with contextlib.suppress(KeyboardInterrupt), ending_like_ctrl_c(), local_head(num_cpus=cpus) as head:
        print(f"Ray head with {cpus} CPUs, dashboard {head.dashboard}\n")
        print(
            f"  export RAY_AUTH_MODE=token RAY_ADDRESS={head.dashboard}   # for: ray job submit --working-dir . -- ..."
        )
        print(f"  export RAY_AUTH_MODE=token RAY_ADDRESS={head.address}   # for: scaleray train -c ...")
        print("  export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0   # for other tools of Ray: it listens on 127.0.0.1 alone")
        print("\nCtrl-C ends it.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
