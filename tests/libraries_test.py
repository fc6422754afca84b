#!/usr/bin/env python3
"""Nothing that is installed needs an RDMA vendor's library: all of it starts on a machine that has none, and says what
to install when one is asked for. The libraries are hidden in a mount namespace of the test's own.

  libraries_test.py BUILD          installs BUILD into a scratch tree first
  libraries_test.py --tree TREE    looks at what lies in TREE/bin and TREE/lib*
"""
import pathlib
import re
import subprocess
import sys
import tempfile

HIDDEN = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libucp.so.0", "libucs.so.0", "libuct.so.0")
VENDORS = re.compile(r"\(NEEDED\).*\[(lib(?:ibverbs|rdmacm|mlx5|ucp|ucs|uct|ucm)\.so[^\]]*)\]")
INSIDE = "--inside"


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def elf_files(tree):
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF" and (path.parent.name == "bin" or ".so" in path.name):
                    yield path


def places():
    """Where the loader would find them."""
    cache = run("/sbin/ldconfig", "-p").stdout
    return [line.split("=> ")[1].strip() for line in cache.splitlines() if line.split(" ")[0].strip() in HIDDEN]


def expect(what, result, *texts):
    output = result.stdout + result.stderr
    for text in texts:
        if text not in output:
            sys.exit(f"{what}: '{text}' is not in:\n{output}")


def inside(tree):
    """All libraries are hidden, and all of it starts."""
    for place in places():
        subprocess.run(["mount", "--bind", "/dev/null", place], check=True)
    for name in HIDDEN:
        if run(sys.executable, "-c", f"import ctypes; ctypes.CDLL('{name}')").returncode == 0:
            sys.exit(f"{name} is still there: the test hides nothing")
    for path in elf_files(tree):
        if path.parent.name == "bin":
            result = run(str(path), "--help")
            if result.returncode != 0:
                sys.exit(f"{path.name} --help ends with {result.returncode}:\n{result.stdout}{result.stderr}")
        else:
            result = run(sys.executable, "-c", f"import ctypes; ctypes.CDLL('{path}')")
            expect(path.name, result)
            if result.returncode != 0:
                sys.exit(f"{path.name} can't be loaded:\n{result.stderr}")
    tool = str(tree / "bin/rejoin_write_bw")
    asked = [("ibverbs", "libibverbs.so.1 is not there: install it (Debian: libibverbs1 and ibverbs-providers"),
             ("ucx:tcp", "libucs.so.0 is not there: install it (Debian: libucx0")]
    for transport, told in asked:
        result = run(tool, "--transport", transport, "--bind_source_ip", "127.0.0.1", "-p", "0")
        expect(f"{tool} --transport {transport}", result, told)
        if result.returncode == 0:
            sys.exit(f"{tool} --transport {transport} ends with 0")


def main():
    if sys.argv[1] == INSIDE:
        return inside(pathlib.Path(sys.argv[2]))
    with tempfile.TemporaryDirectory(prefix="rejoin-libraries-") as scratch:
        tree = pathlib.Path(sys.argv[2] if sys.argv[1] == "--tree" else scratch)
        if sys.argv[1] != "--tree":
            subprocess.run(["cmake", "--install", sys.argv[1], "--prefix", scratch], check=True, stdout=subprocess.DEVNULL)
        files = list(elf_files(tree))
        if not any(path.name == "rejoin_write_bw" for path in files):
            sys.exit(f"no programs in {tree}")
        for path in files:
            needed = VENDORS.findall(run("readelf", "-d", str(path)).stdout)
            if needed:
                sys.exit(f"{path.name} needs {', '.join(needed)}: load it at run time (base/shared_library.h)")
        namespace = ["unshare", "-m"] if run("unshare", "-m", "true").returncode == 0 else ["unshare", "-Urm"]
        if run(*namespace, "true").returncode != 0:
            print("skipped: no mount namespace may be made here, so the libraries can't be hidden")
            sys.exit(77)
        sys.exit(subprocess.run([*namespace, sys.executable, __file__, INSIDE, str(tree)], timeout=300).returncode)


main()
