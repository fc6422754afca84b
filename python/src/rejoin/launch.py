"""Which replica and rank this process is, as its launcher's variables say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rejoin.errors import InvalidArgument

# GROUP_RANK and TORCHX_REPLICA_IDX are none of them: both are numbers of nodes.
_REPLICA = ("REJOIN_REPLICA", "REPLICA_GROUP_ID", "LWS_GROUP_INDEX", "SLURM_ARRAY_TASK_ID")
_RANK = ("REJOIN_RANK", "RANK", "SLURM_PROCID")


@dataclass(frozen=True)
class Place:
    """A replica, and the rank in it."""

    replica: int
    rank: int


def _number(names: tuple[str, ...], environment: Mapping[str, str], otherwise: int | None, what: str) -> int:
    for name in names:
        text = environment.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise InvalidArgument(f"{name}={text!r} is no number, and should say which {what} this process is")
        return int(text)
    if otherwise is None:
        raise InvalidArgument(
            f"nothing says which {what} this process is: set one of {', '.join(names)}, or start it with rejoin-run",
        )
    return otherwise


def place_from_environment(environment: Mapping[str, str] | None = None) -> Place:
    """Find replica and rank.

    The replica is the first of REJOIN_REPLICA, REPLICA_GROUP_ID (torchft), LWS_GROUP_INDEX (Kubernetes'
    LeaderWorkerSet) and SLURM_ARRAY_TASK_ID; the rank in it that of REJOIN_RANK, RANK (torchrun) and SLURM_PROCID,
    or 0. Raises `InvalidArgument` where none says the replica, or one is no number.
    """
    variables = os.environ if environment is None else environment
    return Place(
        replica=_number(_REPLICA, variables, None, "replica"), rank=_number(_RANK, variables, 0, "rank of its replica")
    )


def place_given(replica: object, rank: object) -> Place:
    """Give this place, and find what is None as `place_from_environment` does."""
    variables = dict(os.environ)
    for what, given in (("replica", replica), ("rank", rank)):
        if given is None:
            continue
        if not str(given).isdecimal():
            raise InvalidArgument(f"{what}={given!r}: it is to be a whole number, from 0")
        variables[f"REJOIN_{what.upper()}"] = str(given)
    return place_from_environment(variables)


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """Find this process's rank on its machine: LOCAL_RANK (torchrun), SLURM_LOCALID, or 0."""
    variables = os.environ if environment is None else environment
    return _number(("LOCAL_RANK", "SLURM_LOCALID"), variables, 0, "rank on its machine")


def ranks_of_replica(environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Find how many processes the launcher has started for this replica, and which variable says so.

    WORLD_SIZE (torchrun); or, where the rank is SLURM_PROCID's, SLURM_STEP_NUM_TASKS: the tasks of this `srun`. Without
    them it is 1.
    """
    variables = os.environ if environment is None else environment
    names = ["WORLD_SIZE"] + ["SLURM_STEP_NUM_TASKS"] * ("REJOIN_RANK" not in variables)
    for name in names:
        if name in variables:
            return name, _number((name,), variables, None, "number of ranks")
    return "", 1
