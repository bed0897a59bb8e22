"""All checks of what was seen and measured on a cluster."""

from __future__ import annotations

from scaleray.preflight.clocks import check_clocks
from scaleray.preflight.machines import machine_checks
from scaleray.preflight.services import check_mlflow, check_ports, check_storage
from scaleray.preflight.speeds import all_reduce_checks, check_rates, link_checks
from scaleray.preflight.versions import check_drivers, check_nodes, check_packages
from scaleray.records.preflight import Measured, PreflightCheck


def judge(measured: Measured) -> list[PreflightCheck]:
    """Every check, in the order in which a user would mend things."""
    checks = [check_nodes(measured)]
    if any(not node.error for node in measured.nodes):
        checks += [check_packages(measured), check_drivers(measured), *machine_checks(measured)]
    return [
        *checks,
        check_clocks(measured),
        check_ports(measured),
        check_storage(measured),
        check_mlflow(measured),
        check_rates(measured),
        *all_reduce_checks(measured),
        *link_checks(measured),
    ]
