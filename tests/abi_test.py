#!/usr/bin/env python3
"""Programs that were linked with librejoin.so run with this one, too: its symbols and the types of its public headers are
those that are kept in rejoin/abi for its SONAME, as abidiff compares them.

  abi_test.py BUILD SOURCE            compares
  abi_test.py BUILD SOURCE --write    keeps what there is now: of a SONAME that has not been released, or of a new one
"""
import lzma
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

build, kept = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]) / "rejoin/abi"
LIBRARY, COMPILER = build / "lib/librejoin.so", "12"  # GCC's version that what is kept was made with


def run(*command, allowed=(0,)):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    if done.returncode not in allowed:
        sys.exit(f"{' '.join(map(str, command))} ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def types_of(headers):
    """A program text with a function for each type that these headers declare, so that a library of it tells of all."""
    includes, functions = [], []
    for header in sorted(headers.rglob("*.h")):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
        includes.append(f'#include "{header.relative_to(headers)}"')
        namespace = (re.findall(r"^namespace ([\w:]+) {", text, re.M) or [""])[-1]  # those before it declare what is elsewhere
        for found in re.finditer(r"(?<!>\n)^(?:typedef )?(?:class|struct|enum class|enum) (\w+)(?: final)?(?: : [^;{(]+)? {", text, re.M):
            name = f"{namespace}::{found[1]}" if namespace else found[1]
            functions.append(f'extern "C" __attribute__((visibility("default"))) void rejoin_abi_{name.replace("::", "_")}(const {name}*) {{}}')
    if len(functions) < 40:
        sys.exit(f"only {len(functions)} types are found in {headers}")
    return "\n".join(includes + functions) + "\n"


def description(scratch):
    """Of all public types, as XML of abidw's."""
    run("cmake", "--install", build, "--component", "development", "--prefix", scratch / "tree")
    headers = next((scratch / "tree/include").glob("rejoin-*"))
    (scratch / "types.cc").write_text(types_of(headers), encoding="utf-8")
    run("c++", "-std=c++20", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-eliminate-unused-debug-types", "-femit-class-debug-always",
        f"-I{headers}", scratch / "types.cc", "-o", scratch / "types.so")
    return run("abidw", "--headers-dir", headers, "--drop-private-types", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs",
               "--type-id-style", "hash", scratch / "types.so")


soname = re.search(r"\(SONAME\).*\[(.*)\]", run("readelf", "-d", LIBRARY))[1]
symbols = sorted(line.split()[-1].split("@")[0] for line in run("nm", "-D", "--defined-only", LIBRARY).splitlines() if " A " not in line)
of_symbols, of_types = kept / f"{soname}.symbols", kept / f"{soname}.abi.xz"
remedy = f"Raise the minor version in CMakeLists.txt, which changes the SONAME; or, where {soname} has never been released: tests/abi_test.py BUILD SOURCE --write"
able = shutil.which("abidiff") is not None and run("c++", "-dumpversion").split(".")[0].strip() == COMPILER and platform.machine() == "x86_64"

with tempfile.TemporaryDirectory(prefix="rejoin-abi-") as name:
    scratch = pathlib.Path(name)
    if "--write" in sys.argv:
        if not able:
            sys.exit(f"it needs abidw (Debian: abigail-tools), GCC {COMPILER} as c++, and amd64")
        kept.mkdir(exist_ok=True)
        of_symbols.write_text("\n".join(symbols) + "\n", encoding="utf-8")
        of_types.write_bytes(lzma.compress(description(scratch).encode(), preset=9))
        sys.exit(0)
    if not of_symbols.exists() or not of_types.exists():
        sys.exit(f"nothing is kept of {soname} in {kept}: tests/abi_test.py BUILD SOURCE --write")
    before = of_symbols.read_text(encoding="utf-8").split()
    gone, new = sorted(set(before) - set(symbols)), sorted(set(symbols) - set(before))
    if gone:
        sys.exit(f"{soname} has lost symbols:\n  " + "\n  ".join(gone) + f"\n{remedy}")
    if new:
        sys.exit("symbols are new, and not kept, so that nobody would miss them later:\n  " + "\n  ".join(new) + "\nKeep them: tests/abi_test.py BUILD SOURCE --write")
    if not able:
        print(f"SKIPPED: the types of librejoin.so; it needs abidiff (Debian: abigail-tools), GCC {COMPILER} as c++, and amd64, of which they are kept")
        sys.exit(77)
    old, now = scratch / "old.abi", scratch / "now.abi"
    old.write_bytes(lzma.decompress(of_types.read_bytes()))
    now.write_text(description(scratch), encoding="utf-8")
    done = subprocess.run(["abidiff", "--no-added-syms", old, now], capture_output=True, text=True, timeout=120)
    if done.returncode & 3:
        sys.exit(f"abidiff fails:\n{done.stdout}{done.stderr}")
    if done.returncode:
        sys.exit(f"public types of {soname} have changed:\n{done.stdout}\n{remedy}")
print(f"{soname}: {len(symbols)} symbols, and the types are as they were")
