#!/usr/bin/env python3
"""Style as a failing test: layering, lengths, banned calls. See docs/design-notes.md."""
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent
tracked = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
sources = [root / f for f in tracked if f.endswith((".h", ".cc")) and (root / f).exists()]

# A folder may include itself and what stands here; arrows only point down.
may_use = {
    "base": set(),
    "device": {"base"},
    "transport": {"base", "device"},
    "local": {"base", "device"},
    "membership": {"base"},
    "ftar": {"base", "device", "transport"},
    "collectives": {"base", "device", "transport", "ftar"},
    "catchup": {"base", "device", "transport", "local"},
    "nccl": {"base", "transport"},
    "daemon": {"base", "device", "transport", "local", "membership", "catchup"},
    "rejoin": {"base", "device", "transport", "local", "membership", "catchup", "ftar", "collectives"},
    "fuzz": {"base", "transport", "local", "membership", "catchup", "daemon", "nccl"},
    "sim": {"base", "transport", "membership", "ftar", "daemon", "rejoin"},
    "chaos": {"base", "rejoin"},
    "bench": {"base", "device", "transport", "ftar", "catchup", "daemon", "rejoin"},
    "examples": {"base", "device", "rejoin", "membership", "sim"},
    "tests": {"base", "transport", "local", "membership", "daemon", "rejoin", "bench", "tests"},
}
banned = {
    r"\bgetenv\(": "configuration is read in one place (CLI11); nothing else reads the environment",
    r"\bstd::rand\b|\brand\(\)": "chance comes in as a parameter",
    r"\busing namespace std;": "",
    r"\bsleep_for\(|\busleep\(|\bsleep\(": "wait for the event, with a deadline",
    r"#include <(ucp|uct|ucs)/": "vendor headers stay inside their backend",
}
allowed = {
    (r"\bgetenv\(", "device/tests/library.h"),
    (r"\bgetenv\(", "device/tests/fake_streams.h"),  # as NVIDIA's driver does
    (r"\bgetenv\(", "daemon/service_manager.cc"),  # systemd says there, and nowhere else, where it listens
    (r"\bgetenv\(", "nccl/devices.cc"),  # NCCL and its plugins are configured by the environment
    (r"\bgetenv\(", "tests/process.h"),
    (r"\bgetenv\(", "tests/slow_file.cc"),  # it is preloaded, and has no other way to be told
    (r"\bgetenv\(", "transport/tests/backends.h"),
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "tests/process.h"),        # polls other processes
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "device/tests/library.h"),  # polls a GPU, which may be made of threads
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "device/tests/fake_streams.h"),  # a GPU polls flags, and takes no CPU's time
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "examples/demo_run.cc"),  # reads files that other processes append to
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "examples/demo_job.cc"),
    (r"\bsleep_for\(|\busleep\(|\bsleep\(", "examples/demo_etcd.cc"),
}
# Headers of others that cost seconds wherever they are included, and who may include them: a header of ours that does
# passes the cost on.
heavy = {
    "CLI/": r"base/command_line\.cc",
    "nlohmann/json.hpp": r".*\.cc|examples/demo_story\.h|tests/(daemons|demo_support)\.h",
    "spdlog/": r"(base|rejoin)/log\.(h|cc)|base/own_logging\.cc|nccl/plugin\.cc|fuzz/nccl\.cc|daemon/tests/node_server_test\.cc",
    "asio": r"daemon/.*\.cc|daemon/(control_tls|framed|listen|opener|resolver|status_server|tests/etcd_support)\.h|fuzz/framed\.cc",
    "grpc": r"daemon/etcd_(client\.cc|channel\.(h|cc))",
    "google/": r"",
    "rapidcheck": r".*/tests/.*\.cc",
}
# Who may know a backend of transport/, or a part of one: those who make engines, and those who ask a machine about it.
# The simulated network is everybody's who tests.
knows_backends = r"transport/.*|bench/perf/link\.cc|daemon/doctor(\.h|_\w+\.cc)|fuzz/\w+\.cc|nccl/(connecting|devices)\.cc|rejoin/secret_address\.cc|sim/world\.h|.*/tests/.*"
MAX_LINES, MAX_COLUMNS = 400, 120
problems = []

for path in (root / f for f in tracked if f.endswith(".py") and (root / f).exists()):
    if (length := len(path.read_text().splitlines())) > MAX_LINES:
        problems.append(f"{path.relative_to(root)}: {length} lines; over {MAX_LINES}, split it by concern")

for path in sources:
    name = str(path.relative_to(root))
    folder = name.split("/")[0]
    lines = path.read_text().split("\n")
    if len(lines) - 1 > MAX_LINES:
        problems.append(f"{name}: {len(lines)} lines; over {MAX_LINES}, split it by concern")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            problems.append(f"{name}:{number}: {len(line)} columns, over {MAX_COLUMNS}")
        include = re.match(r'#include "([a-z_]+)/', line)
        if include and folder in may_use and include.group(1) in may_use and include.group(1) != folder:
            # A folder's own tests may run processes, too.
            if include.group(1) not in may_use[folder] and not ("/tests/" in name and '"tests/process.h"' in line):
                problems.append(f"{name}:{number}: {folder}/ may not use {include.group(1)}/")
        if re.match(r'#include "transport/\w+/', line) and not re.fullmatch(knows_backends, name):
            problems.append(f"{name}:{number}: {folder}/ knows engines by transport/transport.h and transport/factory.h alone")
        foreign = re.match(r"#include <([^>]+)>", line)
        for start, allowed_in in heavy.items():
            if foreign and foreign.group(1).startswith(start) and not re.fullmatch(allowed_in, name):
                problems.append(f"{name}:{number}: <{foreign.group(1)}> takes seconds to compile; it belongs into {allowed_in or 'generated code'}")
        for pattern, why in banned.items():
            if re.search(pattern, line) and not line.lstrip().startswith("//") and (pattern, name) not in allowed:
                if "ucp" in pattern and name.startswith("transport/ucx/"):
                    continue
                problems.append(f"{name}:{number}: banned: {line.strip()} ({why})")
    if name == "rejoin/c.h":  # C
        continue
    if path.suffix == ".h" and "#pragma once" not in lines[:30] and not any(l == "#pragma once" for l in lines):
        problems.append(f"{name}: no #pragma once")
    if path.suffix in (".h",) and not lines[0].startswith("//"):
        problems.append(f"{name}: a header begins with what it is for")

# The form of the code is clang-format 14's, of .clang-format.
formatter = shutil.which("clang-format-14")
if formatter is None:
    print("SKIPPED: the form of the code; it needs the package clang-format-14")
else:
    wrong = subprocess.run([formatter, "--dry-run", "-Werror", *map(str, sources)], cwd=root, capture_output=True, text=True)
    bad = sorted({line.split(":")[0] for line in wrong.stderr.split("\n") if "clang-format-violations" in line})
    problems += [f"{pathlib.Path(name).relative_to(root)}: not as clang-format-14 -i would write it" for name in bad]

# Dead files: every source is named in a CMakeLists.txt.
cmake = "\n".join((root / f).read_text() for f in tracked if f.endswith("CMakeLists.txt"))
for path in sources:
    if path.suffix == ".cc" and path.name not in cmake:
        problems.append(f"{path.relative_to(root)}: not built by any CMakeLists.txt")

# Dead headers: each is included by something that is neither its own .cc nor a test.
includers = {}
for name in (f for f in tracked if f.endswith((".h", ".cc", ".c", ".cu")) and (root / f).exists()):
    for included in re.findall(r'#include [<"]([^">]+)[">]', (root / name).read_text()):
        includers.setdefault(included, set()).add(name)
for path in sources:
    name = str(path.relative_to(root))
    if path.suffix != ".h" or "tests/" in name or name == "base/sanitized.h":  # which is for tests
        continue
    others = [by for ending, all_by in includers.items() if name == ending or name.endswith(f"/{ending}") for by in all_by]
    if all(by == name.removesuffix(".h") + ".cc" or "tests/" in by for by in others):
        problems.append(f"{name}: only tests use it")

# The simulator's mutants are of the code as it is.
mutants = runpy.run_path(str(root / "sim/mutants.py"))
problems += mutants["misplaced"](mutants["MUTANTS"])

print("\n".join(problems) or f"tidy: {len(sources)} files")
sys.exit(1 if problems else 0)
