"""What the README and the other pages name exists: commands, subcommands, flags, variables, metrics, fields of the status, as the programs and their --help say."""
import functools
import pathlib
import re
import subprocess
import sys

bin_dir, source = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
pages = [source / "README.md", source / "CONTRIBUTING.md", *sorted(source.glob("docs/*.md")), *sorted(source.glob("*/README.md"))]
programs = {path.name for path in pathlib.Path(bin_dir).iterdir()}
failures, checked = [], {"commands": 0, "flags": 0, "variables": 0, "names": 0, "settings": 0}


@functools.lru_cache(maxsize=None)
def help_of(*command):
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        failures.append(f"{' '.join(command)} --help ends with {done.returncode}")
    return done.stdout + done.stderr


def help_for(words):
    """What says which flags this command has: by its first words."""
    program, *rest = words
    if program == "./run":
        own = help_of(str(source / "run"))
        behind = {"demo": [f"{bin_dir}/rejoin-demo"], "sim": [f"{bin_dir}/rejoin-sim"], "chaos": ["python3", str(source / "chaos/run.py")]}
        return own + (help_of(*behind[rest[0]]) if rest and rest[0] in behind else "")
    if program == "rejoin":
        return help_of(f"{bin_dir}/rejoin", *rest[: 2 if rest[:1] == ["log"] else 1])
    return help_of(f"{bin_dir}/{program}")


def has(text, flag):
    return re.search(rf"(^|[\s,`[]){re.escape(flag)}(?![\w-])", text) is not None


def text_of(*patterns):
    return "\n".join(path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(source.glob(pattern)))


rejoin_run = (source / "python/src/rejoin/_run_commands.py").read_text()  # of the Python package

# Anything that some program, script or file of ours says about itself.
everything = "\n".join([help_of(str(source / "run")), help_of("python3", str(source / "chaos/run.py")),
                        *(help_of(f"{bin_dir}/{name}") for name in sorted(programs)
                          if name.startswith("rejoin") and not name.startswith("rejoin-minimal")),
                        *(help_of(f"{bin_dir}/rejoin", sub) for sub in ("status", "top", "audit", "doctor", "trace", "explain")),
                        *(help_of(f"{bin_dir}/rejoin", "log", sub) for sub in ("export", "import"))])
sources = text_of("*/*.cc", "*/*.h", "*/*.py", "*/*/*.py", "*/*.sh", "*/CMakeLists.txt", "*/*/*.cc", "*/*/*.h", "*/*/CMakeLists.txt", "CMakeLists.txt", "cmake/*")
FOREIGN = {"--exclude-libs", "--variable", "--bump-revision", "--initial-cluster", "--shm-size", "--cflags", "--comment", "--install", "--libs", "--overlap", "--requeue", "--write", "--no-deps", "--auto-compaction-mode", "--auto-compaction-retention", "--pre-vote", "--prefix", "--shutdown-timeout", "--signal"}  # of other people's programs, and of tests


def check_command(where, line):
    """One command, as in a block of code."""
    words = re.sub(r"^(\s*[\w$]+\$ )?([A-Z_]+=\S+ +)*", "", line.strip()).split(" # ")[0].split("&&")[0].split()
    if not words or not re.match(r"(\./run|rejoin[\w-]*)$", words[0]) or words[0] == "rejoin-position":  # which is a line of a file
        return
    checked["commands"] += 1
    program, rest = words[0], [word for word in words[1:] if word != "…"]
    if program == "rejoin-run":
        own = rest[: rest.index("--")] if "--" in rest else rest
        failures.extend(f"{where}: rejoin-run has no {w}" for w in own if w.startswith("--") and f'"{w}"' not in rejoin_run)
        return
    if program != "./run" and program not in programs:
        if f"add_executable({program} " not in sources:  # some are built where what they need is found
            failures.append(f"{where}: there is no program {program}")
        return
    rest = [word for word in rest if word != "--help"]
    usage = help_for(words[:1]) if program in ("./run", "rejoin") else ""
    if usage and rest and not re.search(rf"^\s*{re.escape(rest[0])}\b", usage, re.M):
        return failures.append(f"{where}: {program} has no command {rest[0]}")
    if program == "./run" and len(rest) > 1 and rest[0] in ("vm", "gpu") and not re.search(rf"^\s*{rest[0]} {rest[1]}\b", usage, re.M):
        return failures.append(f"{where}: ./run has no command {' '.join(rest[:2])}")
    for flag in (word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)):
        checked["flags"] += 1
        if not has(help_for((program, *rest)), flag):
            failures.append(f"{where}: {' '.join(words[:2])} has no flag {flag}")


def check_inline(where, code):
    """Code in a sentence: a command with its words, a flag, or a name alone."""
    if " " in code and not re.search(r" [<>=]+ ", code):
        check_command(where, code)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code):
        checked["flags"] += 1
        if flag not in FOREIGN and not has(everything, flag) and f'"{flag}"' not in rejoin_run:
            failures.append(f"{where}: no program has a flag {flag}")
    for name in re.findall(r"^(rejoin_[a-z_]+)(?:\.[a-z]+)?(?: [<>=]+ |$)", code):
        checked["names"] += 1
        metric = f'"{name.removeprefix("rejoin_").removesuffix("_total")}"'  # of counters
        if name not in programs and metric not in sources and not re.search(rf"\b{name}\b", sources):
            failures.append(f"{where}: {name} is neither a program nor a metric")


# Alert rules and the dashboard ask for metrics that there are.
for file in sorted((source / "deploy").glob("*/*.yml")) + sorted((source / "deploy").glob("*/*.json")):
    for name in sorted(set(re.findall(r"\brejoin_[a-z_]+", file.read_text(encoding="utf-8")))):
        checked["names"] += 1
        if f'"{re.sub("^rejoin_|_(total|bucket|count|sum)$", "", name)}"' not in sources:
            failures.append(f"{file.relative_to(source)}: there is no metric {name}")

for page in pages:
    fenced, empty = False, True
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        where = f"{page.relative_to(source)}:{number}"
        if line.lstrip().startswith("```"):
            fenced = not fenced
        code = fenced or (line.startswith("    ") and empty)
        empty = not line.strip() or (line.startswith("    ") and empty)
        if code:
            check_command(where, line)
        else:
            for inline in re.findall(r"`([^`]+)`", line):
                check_inline(where, inline)
        for variable in re.findall(r"\bREJOIN_[A-Z_]+[A-Z]\b", line):
            checked["variables"] += 1
            if not re.search(rf"\b{variable}\b", everything + sources):
                failures.append(f"{where}: nothing reads a variable {variable}")

# The tables of settings: each flag with its variable and default, and none left out.
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20}
for page, program, mine in (("docs/operations.md", "rejoind", None), ("docs/trainer.md", "rejoin-demo-trainer", r"\(Env:REJOIN_")):
    text, table = help_of(f"{bin_dir}/{program}"), {}
    for row in (source / page).read_text(encoding="utf-8").split("\n"):
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) > 4 and re.match(r"`--[\w-]+`$", cells[1]) and re.match(r"`REJOIN_", cells[2]):
            table[cells[1].strip("`")] = (cells[2].strip("`"), cells[3])
    for flag, rest in re.findall(r"^ +(?:-\w,)?(--[\w-]+)(.*)$", text, re.M):
        variable, default = re.search(r"\(Env:(\w+)\)", rest), re.search(r"=(\S+)", rest)
        if variable is None or (mine and not re.search(mine, rest)):
            continue
        checked["settings"] += 1
        if flag not in table:
            failures.append(f"{page}: its table of settings lacks {flag} of {program}")
            continue
        number = re.match(r"(\d+) (KiB|MiB)$", table[flag][1])
        told = str(int(number[1]) * UNITS[number[2]]) if number else table[flag][1]
        if (variable[1], default[1] if default else "") != (table[flag][0], told):
            failures.append(f"{page}: {flag} has the variable {variable[1]} and the default '{default and default[1]}', not {table[flag]}")

# The deadlines: each with what the code makes of the silence, and none left out.
operations = (source / "docs/operations.md").read_text(encoding="utf-8")
in_code = {what: (int(times), int(parts)) for times, parts, what in
           re.findall(r"constexpr Deadline \w+\{(\d+), (\d+)\}; +// (.*)", (source / "base/deadlines.h").read_text(encoding="utf-8"))}
rows = operations.split("| what is waited for | silences | with 2 s |\n|---|---|---|\n")[1].split("\n\n")[0].split("\n")
in_page = {}
for what, silences, default in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows):
    times, _, parts = silences.partition("/")
    in_page[what] = (int(times), int(parts or 1))
    number, unit = default.split()
    if int(number) * {"s": 1000, "ms": 1}[unit] * int(parts or 1) != 2000 * int(times):
        failures.append(f"docs/operations.md: {silences} of 2 s are not {default}: {what}")
failures.extend(f"docs/operations.md: the table of deadlines and base/deadlines.h differ in: {what}"
                for what in sorted(set(in_code) | set(in_page)) if in_code.get(what) != in_page.get(what))
checked["deadlines"] = len(in_page)

# The status: every field that the page explains is one that a daemon writes.
written = set(re.findall(r'"(\w+)"', text_of("daemon/*.cc")))
for field in re.findall(r"`([a-z_\[\].]+)`", operations.split("\n## Status\n")[1].split("\n## ")[0]):
    checked["names"] += 1
    if not all(part in written for part in re.findall(r"[a-z_]+", field)):
        failures.append(f"docs/operations.md: the status has no field {field}")

for failure in failures:
    print(failure)
print(", ".join(f"{count} {what}" for what, count in checked.items()), f"in {len(pages)} pages")
sys.exit(1 if failures or checked["commands"] < 60 or checked["flags"] < 100 or checked["settings"] < 30 else 0)
