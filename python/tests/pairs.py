"""Two members of a process group in one process."""

import threading
from datetime import timedelta

from rejoin.distributed import Options, ProcessGroup


def make_pair(limit: timedelta, **options: str) -> list[ProcessGroup]:
    """Make both, which have come together."""
    groups = [ProcessGroup(limit, Options(listen="127.0.0.1:0", **options)) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in groups]
    threads = [threading.Thread(target=group.reconfigure, kwargs={"uuid": 1, "handles": handles}) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups
