"""What the processes of a job on one machine take over of the environment.

A shell may have the variables of a node, or of the coordinators, of a cluster's job.
"""

from __future__ import annotations

from collections.abc import Mapping


def _unless_free(variables: dict[str, str], name: str) -> None:
    if not variables.get(name, "").endswith(":0"):  # a port that is free
        variables.pop(name, None)


def without_addresses(environment: Mapping[str, str]) -> dict[str, str]:
    """Give these variables without addresses of data: of several processes on one machine none can have another's."""
    variables = dict(environment)
    variables.pop("REJOIN_ADVERTISE", None)
    _unless_free(variables, "REJOIN_DATA_LISTEN")
    return variables


def without_roles(environment: Mapping[str, str]) -> dict[str, str]:
    """Give these variables without another daemon's socket, role, store and file of addresses."""
    others = {f"REJOIN_{name}" for name in ("SOCKET", "COORDINATOR_ROLE", "RELAY", "ADDRESS_FILE", "STORE")}
    return {
        name: value for name, value in environment.items() if name not in others and not name.startswith("REJOIN_ETCD_")
    }


def of_daemons(environment: Mapping[str, str]) -> dict[str, str]:
    """Give what daemons take of them: no two can have one socket or port, nor a role that one variable gives to all."""
    variables = without_roles(without_addresses(environment))
    _unless_free(variables, "REJOIN_STATUS")
    for name in ("COORDINATOR", "JOB"):
        variables.pop(f"REJOIN_{name}", None)
    return variables


def of_scripts(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Give what scripts take of them: which rank one is, is said here, or by torchrun where a replica has several.

    How many there are is said, too: a torchrun of the script's own may start others.
    """
    variables = {**without_addresses(environment), "REJOIN_RANKS": str(ranks)}
    for name in ("REJOIN_RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_LOCALID"):
        variables.pop(name, None)
    if ranks == 1:
        variables["REJOIN_RANK"] = "0"
    return variables
