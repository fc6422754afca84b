#!/usr/bin/env python3
"""What `./run gpu bench` has measured, as one JSON and one page: page.py DIR CARD reads DIR/*.json and writes
DIR/bench.json and DIR/bench.html. Of NCCL it reads what rejoin_nccl_check prints, DIR/nccl-*.txt. Standard library only: it runs where nothing else is installed."""
import json
import pathlib
import re
import sys
from html import escape

COLORS = ["#2457a6", "#c77700", "#1b6e3c", "#b3261e"]


def table(head, rows):
    cells = lambda tag, row: "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
    return f"<table><tr>{cells('th', head)}</tr>" + "".join(f"<tr>{cells('td', row)}</tr>" for row in rows) + "</table>"


def bars(rows, unit):
    """Horizontal bars of (name, value), the longest over the whole width."""
    most = max((value for _, value in rows), default=0) or 1
    height = 24 * len(rows) + 6
    out = [f'<svg viewBox="0 0 720 {height}" width="720" height="{height}" role="img">']
    for i, (name, value) in enumerate(rows):
        y, length = 24 * i + 4, 360 * value / most
        out.append(f'<text x="232" y="{y + 13}" text-anchor="end" font-size="12">{escape(name)}</text>'
                   f'<rect x="240" y="{y}" width="{length:.1f}" height="17" fill="{COLORS[i % 2]}"/>'
                   f'<text x="{246 + length:.1f}" y="{y + 13}" font-size="12">{value:.3g} {unit}</text>')
    return "\n".join(out) + "</svg>"


def size(count):
    for unit, of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= of:
            return f"{count / of:g} {unit}"
    return f"{count} B"


def kernels(found, directory):
    if "kernels" not in found:
        return ""
    picture = directory / "kernels.svg"
    drawn = picture.read_text() if picture.exists() else ""
    rows = [(f"{row['what']}, {row['blocks']} blocks, works of {size(row['chunk'])}" if "blocks" in row else row["what"],
             f"{row['gigabytes_per_second']:.1f}", f"{row['ratio']:.2f}") for row in found["kernels"]["rows"]]
    return ("<h2>Kernels</h2><p>Ratios are of bytes read and written to those of the driver's copy.</p>" + drawn +
            "<details><summary>all figures</summary>" + table(("what", "GB/s", "ratio"), rows) + "</details>")


def beside_the_host(found, prefix, title, note, value, unit):
    rows = []
    for name in sorted(found):
        if name.startswith(prefix):
            rows += [(f"{name[len(prefix):].replace('-', ' ')}{label}", figure) for label, figure in value(found[name])]
    return f"<h2>{title}</h2><p>{note}</p>" + bars(rows, unit) if rows else ""


def nccl_lines(text):
    """rejoin_nccl_check's."""
    lines = re.findall(r"^(\w+) +(\d+) B +([\d.]+) us", text, re.M)
    return [{"what": what, "bytes": int(count), "microseconds": float(time)} for what, count, time in lines]


def nccl(found):
    over = {name[len("nccl-"):]: one["rows"] for name, one in sorted(found.items()) if name.startswith("nccl-")}
    if not over:
        return ""
    times = {name: {(row["what"], row["bytes"]): row["microseconds"] for row in rows} for name, rows in over.items()}
    keys = sorted({key for one in times.values() for key in one})
    rows = [(what.replace("_", "-"), size(count), *(times[name].get((what, count), "") for name in times))
            for what, count in keys]
    return ("<h2>NCCL between two processes on this card</h2><p>Microseconds, by the network that carries it.</p>" +
            table(("", "", *times), rows))


def page(found, directory, card):
    served = found.get("probe", {}).get("served", {})
    stood = [row for row in found.get("probe", {}).get("stands_still", []) if row.get("stands")]
    out = [f"<h1>Rejoin on {escape(card or 'a GPU')}</h1>", kernels(found, directory)]
    out.append(beside_the_host(found, "write-", "Writes", "One after the other, as fast as they go.",
                               lambda one: [("", row["BW_average"] / 1024) for row in one["results"]], "GiB/s"))
    out.append(beside_the_host(found, "allreduce-", "All-reduce", "Milliseconds, with two ranks on this card.",
                               lambda one: [(f", {size(row['bytes'])}", row["seconds"] * 1e3) for row in one["rows"]], "ms"))
    out.append(beside_the_host(found, "catchup-", "Catch-up", "The stream, all of it verified; medians.",
                               lambda one: [("", sorted(run["verified_gbps"] for run in one["runs"])[len(one["runs"]) // 2])],
                               "GB/s"))
    out.append(beside_the_host(found, "steps-", "Steps of a session", "Milliseconds, of a bucket that is reduced and committed.",
                               lambda one: [(f", {size(row['bytes'])}", row["step_p50_us"] / 1e3) for row in one["rows"]],
                               "ms"))
    out.append(nccl(found))
    if "trainer_time_ratio" in served:
        out.append("<h2>A daemon beside a trainer that fills the card</h2>" + table(
            ("", "alone, GB/s", "beside each other, GB/s", "ratio", "aim"),
            [("trainer's additions", f"{served['trainer_alone']:.1f}", f"{served['trainer']:.1f}",
              f"{served['trainer_time_ratio']:.2f} × the time", "1.03"),
             ("stream out of its memory", f"{served['daemon_alone']:.2f}", f"{served['daemon']:.2f}",
              f"{served['daemon_rate_ratio']:.2f} of the rate", "0.8")]))
    if stood:
        out.append("<h2>What stands still while a stream waits</h2>" + table(
            ("the trainer's thread is in", "another thread's call"), [(row["does"], row["call"]) for row in stood]))
    style = ("body{font:15px system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
             "table{border-collapse:collapse}td,th{padding:.15rem .7rem;text-align:left;border-bottom:1px solid #ddd}")
    return f"<!doctype html><meta charset=utf-8><title>Rejoin on a GPU</title><style>{style}</style>" + "\n".join(out)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: page.py DIR CARD")
    directory, card = pathlib.Path(sys.argv[1]), sys.argv[2]
    found = {}
    for file in sorted(directory.glob("*.json")):
        if file.name == "bench.json":
            continue
        try:
            found[file.stem] = json.loads(file.read_text())
        except ValueError as error:
            print(f"page.py: {file} is left out: {error}", file=sys.stderr)
    for file in sorted(directory.glob("nccl-*.txt")):
        found[file.stem] = {"rows": nccl_lines(file.read_text())}
    if not found:
        sys.exit(f"page.py: no results in {directory}")
    (directory / "bench.json").write_text(json.dumps({"card": card, "results": found}, indent=1) + "\n")
    (directory / "bench.html").write_text(page(found, directory, card) + "\n")
    print(f"{directory}/bench.json and {directory}/bench.html are written")


if __name__ == "__main__":
    main()
