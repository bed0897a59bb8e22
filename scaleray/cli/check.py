"""`scaleray check`: will this workload train?"""

from __future__ import annotations

from scaleray.cli.options import ConfigFile, Json, Overrides
from scaleray.cli.output import Output, print_json


def check(*overrides: Overrides, config: ConfigFile = None, processes: bool = True, json: Json = False) -> int:
    """Look at a workload before training it: one batch, in about ten seconds, without Ray.

    Shapes and types of the data, whether rows repeat, the loss as sum and count, gradients and the parameters that get
    none, metrics, labels out of range, memory, the speed of the input, and whether two processes train what one does.
    Keys of the config can be given as options, as for train. Exit code 0 when nothing is wrong, 1 when something is.

    Parameters
    ----------
    processes
        Compare two gloo processes with one, for two steps in float64.
    """
    from scaleray.config import load_config

    resolved = load_config(config, flags=overrides)
    if processes:
        from scaleray.launch.workers.forks import OF_A_CHECK, begin_imports

        begin_imports(OF_A_CHECK)  # beside this process's own imports
    from scaleray.verification.check.check import check as run
    from scaleray.verification.check.printed_check import show_check

    output = Output(json=json)
    with output.running():
        output.say(f"checking {resolved.workload.name}")
        record = run(
            resolved, processes=processes, base_dir=config.resolve().parent if config else None, say=output.say
        )
    show_check(output.console, record)
    if json:
        print_json(record.to_dict())
    return 0 if record.passed else 1
