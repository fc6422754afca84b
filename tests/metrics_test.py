#!/usr/bin/env python3
"""Prometheus takes what daemons tell: the rules and the dashboard are right, and a real Prometheus sees a real job lose a
replica and get it back.

  metrics_test.py BIN SOURCE

Debian's prometheus is needed (22 MB to fetch, 330 MB with what it brings), so that ./run page-test installs it, and
./run test does not: without it this is skipped. Where the Python package prometheus_client is there, its parser reads
the metrics, too."""
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse

from observed_job import Job, get, start, until

SKIPPED = 77


def run(*command, **more):
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True, timeout=60, **more)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def check_text(text):
    """What promtool and Prometheus' own client for Python make of it."""
    told = run("promtool", "check", "metrics", input=text)
    assert not told.strip(), f"promtool finds fault with the metrics: {told}"
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        return print("prometheus_client is not here: its parser has not read the metrics")
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    if "rejoin_leads" in kinds:
        assert kinds["rejoin_step_duration_seconds"] == "histogram" and kinds["rejoin_epochs"] == "counter", kinds
    elif "rejoin_trainers" in kinds:
        assert kinds["rejoin_reduced_bytes"] == "counter", kinds
    else:
        assert kinds["rejoin_relay_ranks"] == "gauge", kinds


class Prometheus:
    def __init__(self, folder, targets, rules):
        with socket.socket() as free:  # it takes no port 0
            free.bind(("127.0.0.1", 0))
            self.address = "127.0.0.1:%d" % free.getsockname()[1]
        config = pathlib.Path(folder) / "prometheus.yml"
        config.write_text(json.dumps({
            "global": {"scrape_interval": "250ms", "evaluation_interval": "250ms"},
            "rule_files": [str(rules)],
            "scrape_configs": [{"job_name": "rejoin", "static_configs": [{"targets": targets}]}]}))
        self.process = start(["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb",
                              f"--web.listen-address={self.address}", "--log.level=warn"], f"{folder}/prometheus.out")
        until("Prometheus is ready", 60, self.ready)

    def ready(self):
        try:
            return "Ready" in get(self.address, "/-/ready")
        except OSError:
            return False

    def ask(self, expression):
        answer = json.loads(get(self.address, "/api/v1/query?query=" + urllib.parse.quote(expression)))
        assert answer["status"] == "success", f"{expression}: {answer}"
        return answer["data"]["result"]

    def until(self, expression, seconds=60):
        return until(f"Prometheus sees {expression}", seconds, lambda: self.ask(expression))

    def end(self):
        self.process.kill()
        self.process.wait()


def dashboard_expressions(path):
    dashboard = json.loads(path.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$instance", ".*")
            yield panel["title"], re.sub(r"\$__(rate_interval|range)", "1m", text)


# Of what the job of this test has none: neither several coordinators, nor rails, nor, most of the time, a joiner.
MAY_BE_EMPTY = ("Catching up", "Connections by rails that are down", "The slowest hops", "Received from neighbours")


def main(binaries, source):
    if not shutil.which("prometheus") or not shutil.which("promtool"):
        print("SKIPPED: there is no prometheus here (Debian's package; 330 MB): ./run page-test installs it")
        return SKIPPED
    prometheus = source / "deploy/prometheus"
    run("promtool", "check", "rules", prometheus / "alerts.yml")
    run("promtool", "test", "rules", "alerts_test.yml", cwd=prometheus)
    run("promtool", "check", "config", prometheus / "prometheus.yml")
    with tempfile.TemporaryDirectory() as folder, Job(binaries, folder) as job:
        job.until_all_contribute()
        sees = Prometheus(folder, [job.address(name) for name in job.addresses], prometheus / "alerts.yml")
        try:
            until("all targets are up", 60, lambda: len(sees.ask("up == 1")) == len(job.addresses) == 5)
            sees.until('rejoin_replica_state{replica="1",state="contributor"} == 1')
            job.kill_trainer(1)
            sees.until('rejoin_replica_state{replica="1",state="absent"} == 1')
            sees.until('rejoin_epochs_total{reason="lost"} == 1')
            sees.until("rejoin_recovery_duration_seconds_count == 1")
            sees.until('rejoin_gone_trainers == 1')
            job.start_trainer(1)
            sees.until('rejoin_replica_state{replica="1",state="contributor"} == 1')
            sees.until('rejoin_epochs_total{reason="promoted"} == 1')
            sees.until("increase(rejoin_step_duration_seconds_count[10s]) > 0")
            for title, expression in dashboard_expressions(source / "deploy/grafana/rejoin.json"):
                shown = sees.ask(expression)
                assert shown or title.startswith(MAY_BE_EMPTY) or "leader_term" in expression, f"{title}: nothing by {expression}"
            rules = json.loads(get(sees.address, "/api/v1/rules"))["data"]["groups"][0]["rules"]
            ill = [rule["name"] for rule in rules if rule["health"] == "err" or rule["state"] == "firing"]
            assert not ill, f"rules that fail, or fire without a cause: {ill}"
            for name in job.addresses:
                check_text(get(job.address(name), "/metrics"))
            ends = get(job.address("coordinator"), "/metrics")
            assert 'rejoin_build_info{' in ends and not re.search(r"^# TYPE \w+_total gauge", ends, re.M), ends
        finally:
            sees.end()
    print("Prometheus has seen a replica go and come back")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()))
