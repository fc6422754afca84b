#!/usr/bin/env python3
"""What the packages are made of, as SPDX 2.3: each package with its files' libraries as the loader names them, what it
loads at run time, and the headers that were compiled into it, each as the package of Debian's that it is from.

  sbom.py BUILD      writes BUILD/packages/rejoin_VERSION.spdx.json, of the packages there and of what ninja knows
"""
import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

build = pathlib.Path(sys.argv[1]).resolve()
packages = sorted((build / "packages").glob("*.deb"))
FIELDS = "${Package}\t${Version}\t${source:Package}\t${source:Version}\t${Architecture}\t${Maintainer}\t${Homepage}"
# Loaded at run time where they are asked for (base/shared_library.h), so that no file names them.
LOADED = ("libibverbs1", "librdmacm1", "libucx0")


def run(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


@functools.lru_cache(maxsize=None)
def files():
    """Each file of Debian's here, and the package that it is from: what 'dpkg-query -S' would search again for each."""
    found = {}
    for path in pathlib.Path("/var/lib/dpkg/info").glob("*.list"):
        package = path.name.removesuffix(".list").split(":")[0]
        found.update(dict.fromkeys(path.read_text(encoding="utf-8").splitlines(), package))
    return found


def owner(path):
    """The package that a file is from; nothing where it is from none."""
    names = (path, os.path.realpath(path))
    return next((files()[name] for each in names for name in (each, each.removeprefix("/usr")) if name in files()), None)


def libraries(tree):
    """Of each package's ELF files: what the loader will look for, as the files that it finds here."""
    cache = dict(re.findall(r"^\s+(\S+) \(.*?(?:x86-64|AArch64).*?\) => (\S+)$", run("/sbin/ldconfig", "-p"), re.M))
    names = set()
    for path in tree.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.read_bytes()[:4] == b"\x7fELF":
            names.update(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path)))
    for name in sorted(names):
        if name not in cache:
            sys.exit(f"sbom: the loader finds no {name} here")
        yield cache[name]


def headers():
    """Files outside of the tree that were read to compile what is packed."""
    read = set(re.findall(r"^    (/usr/include/\S+)$", run("ninja", "-C", build, "-t", "deps"), re.M))
    if not read:
        sys.exit(f"sbom: ninja knows of no header in {build}: build there first")
    return read


def licence(package):
    """As its copyright file says, where that is machine-readable: of most of its files."""
    try:
        text = pathlib.Path(f"/usr/share/doc/{package}/copyright").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "not stated in a file of the package"
    found = re.search(r"^Files: *\*\n(?:.*\n)*?License: *(\S.*)$", text, re.M)
    return found[1] if found else "see its copyright file"


def identifier(name):
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", name)


known = {}


def debian(package):
    if package not in known:
        name, version, source, source_version, architecture, maintainer, homepage = run("dpkg-query", "-W", f"-f={FIELDS}\n", package).splitlines()[0].split("\t")
        known[package] = {
            "SPDXID": identifier(f"Package-{name}"), "name": name, "versionInfo": version, "supplier": f"Organization: {maintainer}",
            "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION",
            "licenseComments": f"Debian's copyright file: {licence(name)}", "copyrightText": "NOASSERTION",
            "sourceInfo": f"built from Debian's source package {source} {source_version}",
            "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                              "referenceLocator": f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={architecture}&distro=bookworm"}],
            **({"homepage": homepage} if homepage else {})}
    return known[package]["SPDXID"]


ours, relations = [], []


def relate(one, kind, other, comment=""):
    relation = {"spdxElementId": one, "relationshipType": kind, "relatedSpdxElement": other}
    relations.append(relation | ({"comment": comment} if comment else {}))


compiled = sorted({found for found in map(owner, sorted(headers())) if found})
version = ""
for path in packages:
    name, version, architecture, maintainer = re.findall(r": (.*)", run("dpkg-deb", "-f", path, "Package", "Version", "Architecture", "Maintainer"))
    mine = identifier(f"Package-{name}")
    ours.append({"SPDXID": mine, "name": name, "versionInfo": version, "packageFileName": path.name, "supplier": f"Organization: {maintainer}",
                 "downloadLocation": "NOASSERTION", "filesAnalyzed": False, "licenseConcluded": "Apache-2.0", "licenseDeclared": "Apache-2.0",
                 "copyrightText": "NOASSERTION", "primaryPackagePurpose": "LIBRARY" if name.startswith("lib") else "APPLICATION",
                 "checksums": [{"algorithm": "SHA256", "checksumValue": hashlib.sha256(path.read_bytes()).hexdigest()}],
                 "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": f"pkg:deb/{name}@{version}?arch={architecture}"}]})
    relate("SPDXRef-DOCUMENT", "DESCRIBES", mine)
    with tempfile.TemporaryDirectory() as scratch:
        run("dpkg-deb", "-x", path, scratch)
        linked = sorted({found for found in map(owner, libraries(pathlib.Path(scratch))) if found})
    for package in linked:
        relate(mine, "DYNAMIC_LINK", debian(package))
    if linked:  # else it has no code
        for package in compiled:
            relate(debian(package), "BUILD_DEPENDENCY_OF", mine, "headers of it were compiled into the project; which package has them, ninja does not tell")
        for package in LOADED:
            relate(debian(package), "OPTIONAL_DEPENDENCY_OF", mine, "loaded at run time where it is asked for")
for one in ours:
    relate(debian(owner("/usr/bin/c++")), "BUILD_TOOL_OF", one["SPDXID"])
made = os.environ.get("SOURCE_DATE_EPOCH")
when = datetime.datetime.fromtimestamp(int(made), datetime.timezone.utc) if made else datetime.datetime.now(datetime.timezone.utc)
digest = hashlib.sha256("".join(one["checksums"][0]["checksumValue"] for one in ours).encode()).hexdigest()
document = {"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"rejoin_{version}",
            "documentNamespace": f"https://rejoin.example/spdx/rejoin-{version}-{digest}",
            "creationInfo": {"created": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: rejoin-deploy-sbom.py"]},
            "packages": ours + [known[name] for name in sorted(known)], "relationships": relations}
out = build / "packages" / f"rejoin_{version}.spdx.json"
out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
print(f"{out.name}: {len(ours)} packages, of {len(known)} of Debian's")
