"""A real job whose trainers can be killed and started again, for the tests of what is seen of it."""
import json
import os
import pathlib
import subprocess
import time
import urllib.request


def until(what, seconds, met):
    """Waits for it; returns what it returned."""
    deadline = time.monotonic() + seconds
    while True:
        value = met()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.05)


def get(address, path):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.read().decode()


def start(command, out, **more):
    """It ends with this process, however that ends."""
    with open(out, "ab") as file:
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdout=file, stderr=file, **more)


class Job:
    def __init__(self, binaries, folder, replicas=3):
        self.binaries, self.folder, self.replicas = binaries, pathlib.Path(folder), replicas
        self.processes, self.trainers, self.addresses = [], {}, {}
        self.key = self.folder / "key"
        self.key.write_text(os.urandom(32).hex())
        self.key.chmod(0o600)
        self.start_coordinator()
        coordinator = self.addresses["coordinator"]["coordinator"]
        self.daemon("relay", "--relay", "127.0.0.1:0", "--connect", coordinator)
        for replica in range(replicas):  # the last one through the relay
            self.daemon(f"node{replica}", "--socket", self.folder / f"{replica}.sock", "--connect",
                        coordinator if replica + 1 < replicas else self.addresses["relay"]["relay"])
        for replica in range(replicas):
            self.start_trainer(replica)

    def start_coordinator(self):
        before = self.addresses.get("coordinator", {})
        self.coordinator = self.daemon(
            "coordinator", "--coordinator", "--log-directory", self.folder / "log", "--replicas", str(self.replicas),
            "--ranks", "1", "--batch", "8", "--listen", before.get("coordinator", "127.0.0.1:0"),
            status=before.get("status", "127.0.0.1:0"))

    def daemon(self, name, *arguments, status="127.0.0.1:0"):
        file = self.folder / f"{name}.json"
        file.unlink(missing_ok=True)
        process = start([self.binaries / "rejoind", "--name", name, "--job-key-file", self.key, "--address-file", file,
                         "--status", status, "--silence-ms", "2000", *arguments], self.folder / f"{name}.out")
        self.processes.append(process)

        def listens():
            assert process.poll() is None, (self.folder / f"{name}.out").read_text()
            return file.exists()
        until(f"{name} listens", 30, listens)
        self.addresses[name] = json.loads(file.read_text())
        return process

    def start_trainer(self, replica):
        environment = {**os.environ, "REJOIN_REPLICA": str(replica), "REJOIN_RANK": "0",
                       "REJOIN_SOCKET": str(self.folder / f"{replica}.sock")}
        self.trainers[replica] = start([self.binaries / "rejoin-minimal"], self.folder / f"trainer{replica}.out",
                                       env=environment)

    def kill_trainer(self, replica):
        self.trainers[replica].kill()
        self.trainers[replica].wait()

    def address(self, name):
        return self.addresses[name]["status"]

    def status(self):
        return json.loads(get(self.address("coordinator"), "/status"))["coordinator_role"]

    def until_all_contribute(self):
        until("all contribute", 60, lambda: [m["role"] for m in self.status()["members"]] ==
              ["contributor"] * self.replicas)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in [*self.trainers.values(), *self.processes]:
            process.kill()
        for process in [*self.trainers.values(), *self.processes]:
            process.wait()
