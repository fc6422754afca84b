"""Every command in the README names programs, subcommands and flags that exist, as their own --help says."""
import re
import subprocess
import sys

bin_dir, source = sys.argv[1], sys.argv[2]
failures, checked = [], 0


def help_of(*command):
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        failures.append(f"{' '.join(command)} --help ends with {done.returncode}")
    return done.stdout + done.stderr


for line in open(f"{source}/README.md", encoding="utf-8"):
    command = re.match(r"^    (\./run|rejoin\w*|openssl)\b(.*)$", line)
    if not command or command[1] == "openssl":
        continue
    words = command[2].split("#")[0].split("&&")[0].split()
    checked += 1
    if command[1] == "./run":
        if not re.search(rf"^\s*(\./run )?{words[0]}\b", help_of(f"{source}/run"), re.M):
            failures.append(f"./run has no command {words[0]}: {line.strip()}")
        text = help_of(f"{bin_dir}/rejoin-demo") if words[0] == "demo" else None
    elif command[1] == "rejoin":
        text = help_of(f"{bin_dir}/rejoin", words[0])
    else:
        text = help_of(f"{bin_dir}/{command[1]}")
    for flag in (w for w in words if w.startswith("-")):
        if text is not None and not re.search(rf"(^|[\s,]){re.escape(flag)}\b", text):
            failures.append(f"no flag {flag}: {line.strip()}")
for failure in failures:
    print(failure)
print(f"{checked} commands in the README")
sys.exit(1 if failures or checked < 10 else 0)
