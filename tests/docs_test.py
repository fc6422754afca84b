"""The documentation holds together: every link and anchor leads somewhere, every picture is there and used, the README is short, and the glossary has every message."""
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree

root = pathlib.Path(sys.argv[1]).resolve()
pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("*/README.md"))]
MAX_README, WIDEST_PICTURE = 120, 840
SHEETS = {"effective-time.svg"}  # written by a program, of many drawings
failures, links, used = [], 0, set()


def prose(page):
    """A page's lines with their numbers, without code: fenced, indented (behind an empty line), or `inline`."""
    fenced, empty = False, True
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and empty
        empty = not line.strip() or indented
        if fence:
            fenced = not fenced
        elif not fenced and not indented:
            yield number, re.sub(r"`[^`]*`", lambda code: "`" + "x" * (len(code[0]) - 2) + "`", line), line


def anchors(page):
    """As GitHub makes them of headings; mkdocs.yml has the site make the same."""
    seen = {}
    for _, _, line in prose(page):
        heading = re.match(r"#+ +(.*)", line)
        if not heading:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        yield slug if count == 0 else f"{slug}-{count}"


for page in pages:
    name = page.relative_to(root)
    for number, hidden, line in prose(page):
        for found in re.finditer(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", hidden):
            target = line[found.start(2):found.end(2)]
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            if not there.exists():
                failures.append(f"{name}:{number}: {target} leads nowhere")
            elif anchor and anchor not in anchors(there):
                failures.append(f"{name}:{number}: {path or name} has no heading #{anchor}")
            if found[1]:
                used.add(there)

for picture in sorted(root.glob("docs/*.svg")):
    name = picture.relative_to(root)
    if picture not in used:
        failures.append(f"{name}: no page shows it")
    drawn = xml.etree.ElementTree.parse(picture).getroot()
    if (float(drawn.get("width", "inf")) > WIDEST_PICTURE and picture.name not in SHEETS) or drawn.get("viewBox") is None:
        failures.append(f"{name}: a picture has a viewBox and a width of at most {WIDEST_PICTURE}")
    first = next((shape for shape in drawn.iter() if shape.tag.endswith("}rect")), None)
    if first is None or first.get("fill", "none") not in ("#fff", "#ffffff", "white"):
        failures.append(f"{name}: begins with no white ground, so that its text can't be read in a dark theme")

lines = (root / "README.md").read_text(encoding="utf-8").count("\n")
if lines > MAX_README:
    failures.append(f"README.md: {lines} lines, over {MAX_README}: the rest belongs into docs/")
shown = (root / "mkdocs.yml").read_text(encoding="utf-8")
for page in root.glob("docs/*.md"):
    if f": {page.name}\n" not in shown:
        failures.append(f"mkdocs.yml: docs/{page.name} is in no part of the site")

glossary = (root / "docs/glossary.md").read_text(encoding="utf-8")
wrappers = {"FromNode", "ToNode", "FromTrainer", "ToTrainer", "Stream", "LogRecord", "Segment", "Bucket", "RangeDigest"}
for proto in ("membership/control.proto", "daemon/local.proto", "catchup/stream.proto", "rejoin/checkpoint.proto"):
    for message in re.findall(r"^ *message (\w+)", (root / proto).read_text(encoding="utf-8"), re.M):
        if message not in wrappers and not re.search(rf"`(\w+\.)?{message}`", glossary):
            failures.append(f"docs/glossary.md: has no `{message}` of {proto}")
for state in re.findall(r"enum class \w+State[^{]*{([^}]*)}", (root / "local/page.h").read_text(encoding="utf-8")):
    for word in re.findall(r"^ *(\w+),|(?<=[ ,])(\w+)(?=[ ,]|$)", re.sub(r"//.*", "", state), re.M):
        if f"`{''.join(word)}`" not in glossary:
            failures.append(f"docs/glossary.md: has no `{''.join(word)}` of local/page.h")

known = (root / "base/command_line.cc").read_text(encoding="utf-8")
known = "".join(re.findall(r'"([^"]*)"', known[known.index("kVariables ="):known.index(";", known.index("kVariables ="))]))
for page in pages:
    for variable in sorted(set(re.findall(r"`REJOIN_([A-Z_]*[A-Z])\b", page.read_text(encoding="utf-8")))):
        if variable not in known.split() and page.name != "CONTRIBUTING.md":  # which has macros
            failures.append(f"{page.relative_to(root)}: REJOIN_{variable} is not among base/command_line.cc's variables")

written = subprocess.run([sys.executable, root / "docs/python_reference.py"], capture_output=True, text=True)
if written.stdout != (root / "docs/python.md").read_text(encoding="utf-8"):
    failures.append(f"docs/python.md is not what docs/python_reference.py writes of the package{written.stderr}")

for failure in failures:
    print(failure)
print(f"{len(pages)} pages, {links} links, {len(used)} pictures")
sys.exit(1 if failures or links < 50 else 0)
