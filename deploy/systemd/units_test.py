#!/usr/bin/env python3
"""The units are right, as systemd sees it, and what they confine stays confined.

  units_test.py REJOIND REJOIN
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
PROGRAMS = {"/usr/bin/rejoind": sys.argv[1], "/usr/bin/rejoin": sys.argv[2]}
# The most that 'systemd-analyze security' may find wrong, of 100: devices, a user of its trainers, and their processes.
MOST = {"rejoind@.service": 30, "rejoin-coordinator@.service": 20}

if shutil.which("systemd-analyze") is None:
    print("SKIPPED: the units: systemd-analyze is not there (Debian: systemd)")
    sys.exit(77)


def analyze(*arguments):
    done = subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout + done.stderr


def examines_more_than_once(text, run):
    """Whether doctor, which may take longer than a silence, runs when a unit is started again, as when it first starts."""
    before = re.search(r"^ExecStartPre=-/bin/sh -c '(.*)'$", text, re.M)
    directory = re.search(r"^RuntimeDirectory=(.*)/%i$", text, re.M)
    if not before or not directory or "\nRuntimeDirectoryPreserve=restart\n" not in text:
        return ["doctor does not know whether it is started again"]
    (run / directory[1] / "job").mkdir(parents=True)
    command = before[1].replace("%i", "job").replace("/run/", f"{run}/").replace(PROGRAMS["/usr/bin/rejoin"], "echo")
    said = [subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    return [] if said[0].startswith("doctor ") and said[1] == "" else [f"doctor runs: {said}"]


failures = []
with tempfile.TemporaryDirectory(prefix="rejoin-units-") as scratch:
    for name, most in MOST.items():
        text = (here / name).read_text(encoding="utf-8")
        for installed, built in PROGRAMS.items():
            text = text.replace(installed + " ", built + " ")
        unit = pathlib.Path(scratch) / name.replace("@.", "@job.")
        unit.write_text(text, encoding="utf-8")
        code, said = analyze("verify", "--man=no", unit)
        said = "\n".join(line for line in said.splitlines() if name.split("@")[0] in line)  # other units of this machine
        if code != 0 or said:
            failures.append(f"{name}: systemd-analyze verify ends with {code}: {said}")
        code, said = analyze("security", "--offline=yes", f"--threshold={most}", unit)
        if code != 0:
            failures.append(f"{name}: more than {most / 10} of 10 is exposed:\n{said}")
        for wanted in ("Type=notify", "LoadCredential=", "NoNewPrivileges=yes", "ProtectSystem=strict", "DevicePolicy=closed", "RestrictAddressFamilies=", "ExecStartPre=-"):
            if not re.search(rf"^{wanted}", text, re.M):
                failures.append(f"{name}: has no {wanted}")
        # What UCX, CUDA and the look at trainers' processes need.
        for wrong in ("PrivateDevices", "ProtectProc", "MemoryDenyWriteExecute", "PrivateUsers"):
            if name.startswith("rejoind") and re.search(rf"^{wrong}=", text, re.M):
                failures.append(f"{name}: sets {wrong}")
        failures += [f"{name}: {what}" for what in examines_more_than_once(text, pathlib.Path(scratch) / "run")]
        if "--log-directory" in text or (name.startswith("rejoin-coordinator") and "REJOIN_LOG_DIRECTORY=/var/lib/rejoin/%i\nEnvironmentFile=" not in text):
            failures.append(f"{name}: the log's directory can't be set in its .env file")
        # Each flag is one that the program has.
        for program, built in PROGRAMS.items():
            for line in re.findall(rf"^Exec.*[ =-]{re.escape(built)} ([^;\n]*)", text, re.M):
                rest = line.split()
                command = [built] + ([rest[0]] if not rest[0].startswith("-") else [])
                known = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=20, check=True).stdout
                failures += [f"{name}: {program} has no {flag}" for flag in rest if flag.startswith("--") and f"{flag} " not in known]
print("\n".join(failures) or f"{len(MOST)} units")
sys.exit(1 if failures else 0)
