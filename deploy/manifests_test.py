#!/usr/bin/env python3
"""The manifests and the chart are right: their parts fit together, flags and variables are Rejoin's, versions are the
project's. Where PyPI's packages for it are installed, also: each object is one that Kubernetes' schemas allow, and the
chart renders to the manifests.

  manifests_test.py BIN SOURCE [--all]     --all: what is not installed is a failure
"""
import pathlib
import re
import subprocess
import sys

import yaml

bin_dir, source = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
deploy, failures = source / "deploy", []
VERSIONS = ("1.29", "1.34")  # of Kubernetes: the oldest with sidecars, and a newer one
version = re.search(r"project\(rejoin VERSION ([0-9.]+)", (source / "CMakeLists.txt").read_text())[1]
known = (source / "base/command_line.cc").read_text(encoding="utf-8")
known = set("".join(re.findall(r'"([^"]*)"', known[known.index("kVariables ="):known.index(";", known.index("kVariables ="))])).split())


def expect(right, what):
    if not right:
        failures.append(what)


def objects(path):
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def pods(all_objects):
    for one in all_objects:
        if "template" in one.get("spec", {}):
            yield f"{one['kind']} {one['metadata']['name']}", one["spec"]["template"]


def check_container(where, container, volumes):
    where = f"{where}, {container['name']}"
    names = [each["name"] for each in container.get("env", [])]
    expect(len(names) == len(set(names)), f"{where}: a variable is set twice")
    for name in names:
        expect(not name.startswith("REJOIN_") or name.removeprefix("REJOIN_") in known, f"{where}: Rejoin knows no variable {name}")
    for mount in container.get("volumeMounts", []):
        expect(mount["name"] in volumes, f"{where}: there is no volume {mount['name']}")
    command = container.get("command", [])
    if command[:1] == ["rejoind"]:
        usage = subprocess.run([bin_dir / "rejoind", "--help"], capture_output=True, text=True, timeout=20, check=True).stdout
        for flag in command[1:] + container.get("args", []):
            expect(re.search(rf"{re.escape(flag.split('=')[0])}[ ,\n]", usage), f"{where}: rejoind has no {flag}")


def check(name, all_objects):
    found = {kind: [one for one in all_objects if one["kind"] == kind] for kind in ("Service", "PodDisruptionBudget", "StatefulSet", "Job")}
    for where, pod in pods(all_objects):
        where, spec = f"{name}: {where}", pod["spec"]
        volumes = {each["name"] for each in spec.get("volumes", [])} | {each["metadata"]["name"] for one in found["StatefulSet"]
                                                                       for each in one["spec"].get("volumeClaimTemplates", [])}
        for container in spec.get("initContainers", []) + spec["containers"]:
            check_container(where, container, volumes)
        for secret in (each["secret"] for each in spec.get("volumes", []) if "secret" in each):
            mode = secret.get("defaultMode")
            expect(mode == 0o400 or (mode == 0o440 and "fsGroup" in spec["securityContext"]), f"{where}: a key with this mode is refused: {mode}")
    for one in found["Service"] + found["PodDisruptionBudget"]:
        wanted = one["spec"]["selector"]
        wanted = wanted.get("matchLabels", wanted)
        hit = [where for where, pod in pods(found["StatefulSet"] + found["Job"]) if wanted.items() <= pod["metadata"]["labels"].items()]
        replicas = [each for each in hit if each.startswith("Job ")]
        right = len(replicas) == len(found["Job"]) == one["spec"].get("minAvailable", 0) + 1 if replicas else len(hit) == 1
        expect(right and not (replicas and hit != replicas), f"{name}: {one['kind']} {one['metadata']['name']} selects {hit}")
    for one in found["StatefulSet"]:
        expect(any(each["metadata"]["name"] == one["spec"]["serviceName"] for each in found["Service"]), f"{name}: no Service for {one['spec']['serviceName']}")
    for one in found["Job"]:  # a replica and its daemon
        spec = one["spec"]["template"]["spec"]
        expect(not any("/version" in each for each in one["spec"]["template"]["metadata"]["labels"]), f"{name}: an upgrade would change a Job's template")
        where, daemon, trainer = f"{name}: {one['metadata']['name']}", spec["initContainers"][-1], spec["containers"][0]
        expect(spec["shareProcessNamespace"] and spec["securityContext"]["runAsUser"] > 0, f"{where}: daemon and trainer share neither processes nor a user")
        expect(daemon["restartPolicy"] == "Always", f"{where}: the daemon is no sidecar")
        sockets = [each["value"] for each in trainer["env"] if each["name"] == "REJOIN_SOCKET"]
        expect([f"--socket={each}" for each in sockets] == daemon["command"][1:2], f"{where}: daemon and trainer name different sockets")
        for container in (daemon, trainer):
            expect(any(sockets[0].startswith(each["mountPath"] + "/") for each in container["volumeMounts"]), f"{where}: {container['name']} does not see the socket")


def ends_with(shell, script, told):
    """The exit status of the trainer's container whose script is this, which is told to end as soon as it says a word."""
    with subprocess.Popen(shell + ["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as container:
        container.stdout.readline()
        if told:
            container.terminate()
        return container.wait(timeout=20)


def check_ends(name, all_objects):
    """A Job is complete when its trainer has ended with 0, unless that was told to end: then it has to come back."""
    shell = next(one for one in all_objects if one["kind"] == "Job")["spec"]["template"]["spec"]["containers"][0]["command"]
    heeds, waits = "trap 'exit {}' TERM; ", "echo begun; while :; do sleep 0.01; done"
    for script, told, wanted in (("echo done", False, 0), ("echo failed; exit 3", False, 3), ("echo killed; kill -9 $$", False, 137),
                                 (heeds.format(0) + waits, True, 143), (heeds.format(5) + waits, True, 5), (waits, True, 143),
                                 ("trap 'echo saved; echo all; exit 0' TERM; " + waits, True, 143)):
        got = ends_with(shell, script, told)
        expect(got == wanted, f"{name}: a trainer '{script}'{', told to end,' if told else ''} ends its container with {got}, not {wanted}")


train, others = deploy / "kubernetes/train.yaml", [source / "python/examples/leaderworkerset.yaml"]
check("train.yaml", objects(train))
check_ends("train.yaml", objects(train))
for path in others:
    check(path.name, [one for one in objects(path) if one["kind"] != "LeaderWorkerSet"])  # which is none of Kubernetes' own
chart = yaml.safe_load((deploy / "helm/rejoin/Chart.yaml").read_text(encoding="utf-8"))
values = yaml.safe_load((deploy / "helm/rejoin/values.yaml").read_text(encoding="utf-8"))
expect(chart["version"] == chart["appVersion"] == version, f"the chart has the version {chart['version']}, and the project {version}")
expect(values["daemon"]["image"].endswith(f":{version}"), f"the chart's daemon is {values['daemon']['image']}, and the project {version}")

missing = []
try:
    import kubernetes_validate

    for path in [train, *others]:
        for one in objects(path):
            if "x-k8s.io" in one["apiVersion"]:
                continue
            for kubernetes in VERSIONS:
                try:
                    kubernetes_validate.validate(one, kubernetes, strict=True)
                except kubernetes_validate.ValidationError as error:
                    failures.append(f"{path.name}: {one['kind']} {one['metadata']['name']}, Kubernetes {kubernetes}: {error.message}")
except ImportError:
    missing.append("kubernetes-validate")
try:
    from helm_python.chart import lint
    from helm_python.errors import HelmError

    sys.path.insert(0, str(deploy / "kubernetes"))
    from render import render

    folder = str(deploy / "helm/rejoin")
    given = yaml.safe_load((deploy / "kubernetes/values.yaml").read_text(encoding="utf-8"))
    written = re.sub(r"^#.*\n", "", train.read_text(encoding="utf-8"), flags=re.M)
    expect(render(folder, "train", given) == written, "train.yaml is not what the chart renders: deploy/kubernetes/render.py")
    alone = render(folder, "job", given | {"coordinator": {"count": 1}, "nodeSelector": {"gpu": "yes"}, "env": [{"name": "A", "value": "b"}]})
    check("one coordinator", list(yaml.safe_load_all(alone)))
    located = list(yaml.safe_load_all(render(folder, "job", given | {"daemon": {"locationLabels": ["region", "example.com/zone"]}})))
    check("with locations", located)
    for container in (each for _, pod in pods([one for one in located if one["kind"] == "Job"]) for each in pod["spec"]["initContainers"]):
        variables = {each["name"]: each for each in container["env"]}
        expect(variables["REJOIN_LOCATION"]["value"] == "$(LOCATION_0)/$(LOCATION_1)/$(REJOIN_NODE)", f"the location is {variables['REJOIN_LOCATION']}")
        path = variables["LOCATION_1"]["valueFrom"]["fieldRef"]["fieldPath"]
        expect(path == "metadata.labels['example.com/zone']", f"a part of the location is {path}")
        expect(list(variables).index("LOCATION_1") < list(variables).index("REJOIN_LOCATION"), "a location is made of what comes after it")
    setting, file = {"name": "REJOIN_SILENCE_MS", "value": "5000"}, {"name": "tls", "mountPath": "/tls"}
    of_both = {"env": [setting], "volumeMounts": [file]}
    more = list(yaml.safe_load_all(render(folder, "job", given | {"replicas": 1, "listen": "[::]", "volumes": [{"name": "tls", "emptyDir": {}}], "daemon": of_both,
                                                                  "coordinator": {"count": 1, "volumes": [{"name": "tls", "emptyDir": {}}], **of_both}})))
    check("with settings", more)
    for container in (each for _, pod in pods(more) for each in pod["spec"].get("initContainers", []) + pod["spec"]["containers"] if each["name"] != "trainer"):
        expect(setting in container["env"] and file in container["volumeMounts"], f"{container['name']} lacks a setting or its file")
    expect("0.0.0.0" not in str(more), "something listens on IPv4 alone")
    expect([each["metadata"]["name"] for each in more if each["kind"] == "PodDisruptionBudget"] == ["job-coordinator"], "one replica can't be evicted")
    # Helm reads the numbers of a values file as floats, which it prints as 1e+06.
    large = {"replicas": 3, "ranks": 8, "batch": 1234567, "steps": 1000000, "user": 1000660000, "restarts": 2000000, "terminationGracePeriodSeconds": 1000000}
    rendered = render(folder, "job", given | large)
    expect("e+0" not in rendered, f"large numbers are not whole: {[line for line in rendered.splitlines() if 'e+0' in line]}")
    for line in ('REJOIN_STEPS, value: "1000000"', 'REJOIN_BATCH, value: "1234567"', "runAsUser: 1000660000", "backoffLimit: 2000000"):
        expect(line in rendered, f"large numbers: there is no {line}")
    check("large numbers", list(yaml.safe_load_all(rendered)))
    expect("REJOIN_STORE" not in alone and "job-coordinator-1" not in alone, "one coordinator has a store, or another beside it")
    for wrong, word in (({"image": ""}, "image is not given"), ({"command": []}, "command is not given"), ({"replicas": 0}, "replicas"),
                        ({"coordinator": {"etcd": ""}}, "give coordinator.etcd"), ({"replica": 3}, "replica")):
        try:
            render(folder, "job", given | wrong)
            failures.append(f"the chart takes {wrong}")
        except HelmError as error:
            expect(word in str(error), f"the chart says of {wrong}: {error}")
    failures += [str(each) for each in lint(folder, given)["messages"] if each["severity"] > 1]
except ImportError:
    missing.append("helm-python-sdk")

if missing and "--all" in sys.argv:
    failures.append(f"{' and '.join(missing)} can't be imported")
print("\n".join(failures) or f"{len(objects(train))} objects" + (f"; not asked, since they are not installed: {' and '.join(missing)}" if missing else ""))
sys.exit(1 if failures else 0)
