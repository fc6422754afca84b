"""Loss with and without failures, plotted: runs rejoin-lossless-check and writes docs/lossless.svg.

    lossless_check.py [--failures N] [--out FILE] [more options of rejoin-lossless-check]
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile

import plot

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--failures", type=int, default=1000)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "lossless.svg")
    arguments, more = parser.parse_known_args()
    with tempfile.NamedTemporaryFile("r") as curves:
        command = [ROOT / "build/release/bin/rejoin-lossless-check", "--data", ROOT / "data" / "shakespeare.txt",
                   "--failures", str(arguments.failures), "--out", curves.name, *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="")
        rows = [[float(field) for field in line.split()] for line in curves.read().splitlines()]
    if not rows:
        return done.returncode or 1
    chart = plot.Chart("Loss of the samples as they are trained", "samples trained", "nats a byte", low=1.75)
    chart.line("no failures", [(row[0], row[1]) for row in rows])
    chart.line(f"{arguments.failures} failures", [(row[0], row[2]) for row in rows])
    arguments.out.write_text(plot.page("The demo's model in the simulated cluster", [chart], columns=1, width=820,
                                       height=360, notes=done.stdout.strip().splitlines()))
    print(f"{arguments.out.relative_to(ROOT) if arguments.out.is_relative_to(ROOT) else arguments.out} is written")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
