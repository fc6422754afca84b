#!/usr/bin/env python3
"""librejoin.so shows the symbols that its public headers declare: no other, and none is missing. A program that has
closed it ends in peace.

  exports_test.py BUILD
"""
import pathlib
import re
import subprocess
import sys
import tempfile

build = pathlib.Path(sys.argv[1])
LIBRARY = build / "lib/librejoin.so"
ARCHIVES = ("rejoin_core", "transport", "base", "command_line")


def lines_of(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def body_at(text, at):
    """What stands between the brace at this place and the one that closes it."""
    depth = 0
    for end in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[at + 1:end]
    sys.exit(f"a brace does not close behind: {text[at - 60:at]}")


def functions_in(text):
    return set(re.findall(r"(~?\b[A-Za-z_]\w*)\s*\(", text))


def declared():
    """Class, or namespace -> its functions."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="rejoin-exports-") as scratch:
        subprocess.run(["cmake", "--install", build, "--component", "development", "--prefix", scratch],
                       stdout=subprocess.DEVNULL, check=True)
        headers = list(pathlib.Path(scratch).rglob("*.h"))
        for header in headers:
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
            outside = text
            for match in re.finditer(r"\b(?:class|struct) (\w+)(?: final)?(?: : [^;{(]+)? \{", text):
                body = body_at(text, match.end() - 1)
                found.setdefault(match[1], set()).update(functions_in(body) | {match[1], "~" + match[1]})
                outside = outside.replace(body, "")
            for namespace in re.findall(r"^namespace ([\w:]+) {", text, re.M) or [""]:  # a header has one, or is C
                found.setdefault(namespace, set()).update(functions_in(outside))
    if len(headers) < 12:
        sys.exit(f"only {len(headers)} headers are installed")
    return found


def place(symbol):
    """Class or namespace, and name, of a function as the demangler writes it: ("rejoin", "split") of rejoin::split(…)."""
    name = symbol.replace("[abi:cxx11]", "").split("(")[0]
    while "<" in name:
        shorter = re.sub(r"<[^<>]*>", "", name)
        if shorter == name:
            return None
        name = shorter
    parts = name.split()[-1].split("::")
    if parts[0] != "rejoin" and not parts[-1].startswith("rejoin_"):
        return None
    return (parts[-2] if parts[-2:-1] and parts[-2][:1].isupper() else "::".join(parts[:-1])), parts[-1]


def is_public(symbol, public):
    if symbol.startswith("typeinfo for rejoin::"):  # so that a class is one and the same on both sides
        return symbol.split("::")[-1] in public
    at = place(symbol)
    return at is not None and at[1] in public.get(at[0], ())


def symbols(path, dynamic):
    for line in lines_of("nm", "--demangle", "--defined-only", *(["--dynamic"] if dynamic else []), path):
        found = re.match(r"[0-9a-f]+ ([A-Za-z]) (.*)", line)
        if found:
            yield found[1], re.sub(r"@@?REJOIN_[0-9.]+$", "", found[2])


public = declared()
shown = {symbol for kind, symbol in symbols(LIBRARY, True) if kind != "A"}  # but for the name of the version
failures = [f"librejoin.so shows {symbol}, which no public header declares" for symbol in shown if not is_public(symbol, public)]
# What has a place of its own in an archive is no inline function.
for archive in ARCHIVES:
    for kind, symbol in symbols(next(build.rglob(f"lib{archive}.a")), False):
        if kind == "T" and is_public(symbol, public) and symbol not in shown:
            failures.append(f"librejoin.so hides {symbol}, which a public header declares: is it between that header's two '#pragma GCC visibility'?")
for name in public[""]:  # of C
    if name.startswith("rejoin_") and name not in shown:
        failures.append(f"librejoin.so has no {name}, which rejoin/c.h declares")
# What the library has given to others, and its threads, may be called until the process ends.
CLOSES = """
import _ctypes, ctypes, sys
library, session = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
settings = (ctypes.c_char_p * 2)(b"socket=/nowhere", b"flight-dir=off")
if library.rejoin_open(settings, 2, ctypes.byref(session)) != 0:
    sys.exit("rejoin_open() failed")
library.rejoin_close(session)
_ctypes.dlclose(library._handle)
"""
closes = subprocess.run([sys.executable, "-c", CLOSES, LIBRARY], capture_output=True, text=True, timeout=60, check=False)
if closes.returncode != 0:
    failures.append(f"a program that has closed librejoin.so ends with {closes.returncode}: {closes.stderr}")
# A program may have another fmt and spdlog, whose symbols would be taken for these.
for library in (LIBRARY, build / "lib/libnccl-net-rejoin.so"):
    failures += [f"{library.name} takes from others, or shows: {line}" for line in lines_of("nm", "-DC", library)
                 if re.search(r"\b(fmt::|spdlog::)", line)]
print("\n".join(sorted(set(failures))) or f"{len(shown)} symbols")
sys.exit(1 if failures or len(shown) < 80 else 0)
