"""A manual page and its program's --help name the same flags, with the same defaults and variables."""
import pathlib
import re
import subprocess
import sys

bin_dir, source = sys.argv[1], pathlib.Path(sys.argv[2])
# Each page with the commands that it is of.
PAGES = {
    "rejoin.1": ["rejoin", "rejoin status", "rejoin top", "rejoin audit", "rejoin trace", "rejoin explain", "rejoin doctor", "rejoin log export", "rejoin log import"],
    "rejoind.8": ["rejoind"],
    **{f"{name}.1": [name] for name in ("rejoin-demo", "rejoin-demo-trainer", "rejoin_kernel_bw", "rejoin_gpu_probe", "rejoin_nccl_net_test")},
    "rejoin_allreduce_perf.1": ["rejoin_allreduce_perf"],
    "rejoin_catchup_bw.1": ["rejoin_catchup_bw"],
    **{f"{name}.1": [name] for name in ("rejoin_step_perf", "rejoin_recovery_perf")},
    "rejoin_write_bw.1": ["rejoin_write_bw", "rejoin_read_bw", "rejoin_write_lat", "rejoin_send_lat"],
}
FLAG = r"--?[A-Za-z][\w-]*"
EVERYWHERE = {"-h", "--help", "--version"}  # alike in all programs: a page may leave them out
failures, compared = [], 0


def options(command):
    """Of --help: flags, default and variable of each option. Its name goes on in one line, what it is for may follow in the next."""
    program, *rest = command.split()
    text = subprocess.run([f"{bin_dir}/{program}", *rest, "--help"], capture_output=True, text=True, timeout=20, check=True).stdout
    for line in text.split("\n"):
        names = re.match(rf"  ({FLAG}(?:,{FLAG})*)(.*)", line)
        if names:
            default, variable = re.search(r"=(\S+)", re.sub(r"\[b, kb.*?\]", "", names[2])), re.search(r"\(Env:(\w+)\)", names[2])
            yield names[1].split(","), default and default[1], variable and variable[1]


for page, commands in PAGES.items():
    text = (source / "docs/man" / page).read_text(encoding="utf-8").replace("\\-", "-")
    # An option is a tagged paragraph: its flags in the line behind .TP, what it is for in those that follow.
    entries = {}
    for tag, body in re.findall(r"^\.TP\n(.*)\n((?:(?!\.(?:TP|SH|SS)\b).*\n)*)", text, re.M):
        for flag in re.findall(rf"(?<![\w-]){FLAG}(?![\w-])", tag.split(" ", 1)[1]) if tag.startswith(".B") else []:
            entries[flag] = body
    known = set()
    for command in commands:
        for flags, default, variable in options(command):
            compared += 1
            known.update(flags)
            if EVERYWHERE.issuperset(flags):
                continue
            found = next((entries[flag] for flag in flags if flag in entries), None)
            if found is None:
                failures.append(f"{page}: has no {flags[-1]}, which {command} --help has")
                continue
            if default and default not in found and page != "rejoin_write_bw.1":  # there defaults differ by program
                failures.append(f"{page}: {flags[-1]}: does not name its default, {default}")
            if variable and variable not in text:
                failures.append(f"{page}: {flags[-1]}: does not name its variable, {variable}")
    failures += [f"{page}: names {flag}, which no --help has" for flag in entries if flag not in known | EVERYWHERE]
    if page.rsplit(".", 1)[0] not in {command.split()[0] for command in commands}:
        failures.append(f"{page}: is named for no program of it")

for failure in failures:
    print(failure)
print(f"{len(PAGES)} manual pages, {compared} options")
sys.exit(1 if failures or compared < 80 else 0)
