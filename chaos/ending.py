"""What is looked at when a job has ended, as it should or not."""
import json
import os
import re
import subprocess

from leaders import compare_copies


def audit(run):
    """Of the log; or where there are several coordinators, of all their copies, which are to be the same."""
    job, checker = run.job, run.checker
    for seat in run.wiring.coordinators:
        log = f"{seat.directory}/decisions.log"
        audit = subprocess.run([f"{run.settings.binaries}/rejoin", "audit", log, "--steps", str(job.steps)],
                               capture_output=True, text=True)
        said = " ".join(line for line in (audit.stdout + audit.stderr).split("\n")
                        if "samples" in line or audit.returncode > 1)
        run.log(f"audit: {said}" + (f" ({seat.name})" if run.settings.several else ""))
        if audit.returncode != 0:
            checker.violate("exactly-once", f"rejoin audit of {seat.name}'s log: {said}")
        committed = re.search(r"(\d+) steps committed", audit.stdout)
        if committed is None or int(committed[1]) < checker.committed:
            checker.violate("state-survives", f"step {checker.committed} was committed; {log} does not have it")
    if run.settings.several:
        compared, have = compare_copies(checker, [seat.directory for seat in run.wiring.coordinators])
        run.log(f"copies of the log: records {' '.join(map(str, have))}, of which {compared} were compared; "
                f"{checker.late} decisions were told late")


def look_for_remains(run):
    """Nothing of the job is left: no shared memory, no core, no socket in its namespaces."""
    remains = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")] if run.settings.confined else []
    remains += [f"core: {name}" for name in os.listdir(f"{run.directory}/cwd")]
    if run.settings.confined:
        for host in run.wiring.hosts:
            def sockets():
                with open("/proc/thread-self/net/unix") as table:
                    return [line.split()[-1] for line in table if "@rejoin" in line]
            remains += host.run(sockets)
    for what in remains:
        run.checker.violate("nothing-left", what)


def word_for_step_0(run):
    """What an operator says to give up all, by the coordinator that leads; None while none says how far it has come."""
    for seat in run.wiring.coordinators:
        command = [f"{run.settings.binaries}/rejoin", "status", run.job.addresses.get(seat.name, {}).get("status", ""),
                   "--json"]
        try:
            status = subprocess.run([*seat.host.prefix, *command], capture_output=True, text=True, timeout=10)
            role = json.loads(status.stdout)["coordinator_role"]
        except (subprocess.TimeoutExpired, ValueError, KeyError):
            continue
        if role["store"]["leads"]:
            return f"0@{role['committed'] + role['steps_rolled_back']}"
    return None


def waits_for(run):
    """The coordinators' own status, and how the processes are."""
    for seat in run.wiring.coordinators:
        command = [f"{run.settings.binaries}/rejoin", "status", run.job.addresses.get(seat.name, {}).get("status", "")]
        try:
            status = subprocess.run([*seat.host.prefix, *command], capture_output=True, text=True, timeout=10)
            yield from (status.stdout + status.stderr).strip().split("\n")
        except subprocess.TimeoutExpired:
            yield f"{seat.name} does not answer"
    for process in run.job.processes.values():
        state = "not running"
        if process.pid:
            with open(f"/proc/{process.pid}/stat") as stat:
                state = f"pid {process.pid}, {stat.read().split(') ')[1][0]}"
        yield f"{process.name}: {state}, start {process.starts}"
