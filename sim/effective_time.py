"""Effective training time at 98,304 GPUs: one trace of failures, replayed for three systems in the same model.

    effective_time.py [--days N] [--seeds N] [--out FOLDER]

What a failure costs Rejoin comes from the simulator (rejoin-sim --stalls, run now) and from constants measured on real
processes; every constant stands below with its source. Writes docs/effective-time.md and docs/effective-time.svg.
"""
import argparse
import heapq
import json
import pathlib
import random
import subprocess
import sys
from dataclasses import dataclass, replace

import plot

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA = "Llama 3, arXiv 2407.21783"
FT_HSDP = "FT-HSDP, arXiv 2602.00277, abstract"

# Interruptions of Llama 3's 54 days on 16,384 GPUs (419; its Table 5), and the simulator's fault that is most like each:
# a process that ends, a node that is gone, a rank that hangs, a node that nobody hears.
CAUSES = [("faulty GPU", 148, "kill_trainer"), ("GPU HBM3 memory", 72, "kill_trainer"), ("software bug", 54, "kill_trainer"),
          ("network switch or cable", 35, "partition"), ("host maintenance", 32, "power_loss"),
          ("GPU SRAM memory", 19, "kill_trainer"), ("GPU system processor", 17, "hang_trainer"), ("NIC", 7, "partition"),
          ("NCCL watchdog timeout", 7, "hang_trainer"), ("silent data corruption", 6, "kill_trainer"),
          ("GPU thermal interface or sensor", 6, "kill_trainer"), ("SSD", 3, "power_loss"), ("power supply", 3, "power_loss"),
          ("server chassis", 2, "power_loss"), ("IO expansion board", 2, "power_loss"), ("dependency", 2, "kill_trainer"),
          ("CPU", 2, "power_loss"), ("system memory", 2, "power_loss")]
SIM_SILENCE_MS = 200  # of sim/world.cc: what it waits before it calls a peer dead


@dataclass(frozen=True)
class Constants:
    replicas: int = 24
    mtbf_min: float = 18
    restart_min: float = 10
    checkpoint_min: float = 5
    ft_stall_min: float = 3
    step_s: float = 6.2
    state_gb: float = 1.38
    catch_up_gb_s: float = 1.0
    gradient_gb: float = 0.198
    ring_gb_s: float = 20
    silence_s: float = 2
    exit_ms: float = 19.3
    decide_ms: float = 6.9
    log_ms: float = 3
    hops_ms: float = 1
    hang_share: float = -1  # of failures that are noticed by silence; negative: as the causes have it


SOURCES = {
    "replicas": ("replicas", "", "of 4,096 GPUs each"),
    "mtbf_min": ("mean time between failures", "min", "one every 18 minutes at 98 K GPUs (FT-HSDP's scale); Llama 3's rate "
                 f"({LLAMA}: 419 in 54 days on 16,384) is one every 31 at this size"),
    "restart_min": ("restart of what was lost", "min", FT_HSDP),
    "checkpoint_min": ("between checkpoints of the synchronous system", "min", "assumed; half of it is lost with each failure"),
    "ft_stall_min": ("FT-HSDP's stall of all for each failure", "min", FT_HSDP),
    "step_s": ("a step", "s", f"6 × 405e9 × 16.8e6 tokens / (16,384 × 400 TFLOP/s); {LLAMA}, Table 4"),
    "state_gb": ("state of a rank", "GB", "405e9 × 14 bytes / 4,096: bf16 weights, fp32 master and two moments"),
    "catch_up_gb_s": ("catch-up, for each rank", "GB/s", "assumed: a quarter of what catch-up reached over shared memory (3.8, docs/performance.md)"),
    "gradient_gb": ("gradients of a rank", "GB", "405e9 × 2 bytes / 4,096, bf16"),
    "ring_gb_s": ("all-reduce, bytes on the wire", "GB/s", "assumed: 0.4 of a 400 Gb/s NIC for each GPU"),
    "silence_s": ("silence: how long a peer may be silent", "s", "rejoind's default"),
    "exit_ms": ("a process ends, until all others have committed the broken step", "ms", "measured, real processes, the worst of 8 runs (docs/performance.md)"),
    "decide_ms": ("the coordinator's time for a new epoch at 98,304 ranks", "ms", "measured, `./run sim --scale`"),
    "log_ms": ("its write to disk", "ms", "measured: an fsync, 1 to 3 ms on the build machine"),
    "hops_ms": ("rank, node, relay, coordinator and back", "ms", "assumed: eight hops of a datacentre's network"),
}


def simulated(seeds):
    """Beyond a step without failures, in units of the simulator's silence (stall) and of steps (until all are back)."""
    out = subprocess.run([ROOT / "build/release/bin/rejoin-sim", "--stalls", "--seeds", str(seeds)], check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    return {one["kind"]: {"silences": one["stall_ms"] / SIM_SILENCE_MS, "stall_ms": one["stall_ms"],
                          "steps": max(0.0, (one["lost_ms"] - one["stall_ms"]) / one["step_ms"])}
            for one in json.loads(out)}


def stall_s(kind, c, sim):
    """Of all the others, for one failure: noticing it, deciding, and reducing the broken step's gradients again."""
    ring = 2 * c.gradient_gb * (c.replicas - 1) / c.replicas / c.ring_gb_s
    change = (c.decide_ms + c.log_ms + c.hops_ms) / 1e3
    noticed = c.exit_ms / 1e3 if kind == "kill_trainer" else sim[kind]["silences"] * c.silence_s + c.exit_ms / 1e3
    # Admission and promotion are an epoch each.
    return noticed + change + ring + 2 * (c.exit_ms / 1e3 + change) + sim[kind]["steps"] * c.step_s


def trace_of(days, c, seed=1):
    """Failures: time in seconds, kind, replica."""
    chance, at, failures = random.Random(seed), 0.0, []
    kinds = [kind for _, count, kind in CAUSES for _ in range(count)]
    while at < days * 86400:
        at += chance.expovariate(1 / (c.mtbf_min * 60))
        kind, u = chance.choice(kinds), chance.random()
        if c.hang_share >= 0:
            kind = "hang_trainer" if u < c.hang_share else "kill_trainer"
        failures.append((at, kind, chance.randrange(c.replicas)))
    return failures


def synchronous(days, c, _):
    """Shares of the time in which the job gets on, and of all GPUs' time that goes into steps that count."""
    end, up_since, useful = days * 86400, 0.0, 0.0
    for at, _, _ in trace_of(days, c) + [(end, "", 0)]:
        if at > up_since:  # otherwise the restart itself failed
            useful += max(0.0, at - up_since - (c.checkpoint_min * 30 if at < end else 0))
        up_since = at + c.restart_min * 60
    return useful / end, useful / end


def by_replica(days, c, stall_of, back_after):
    end, now, stalled_until, on, work = days * 86400, 0.0, 0.0, 0.0, 0.0
    out = {}  # replica: when it contributes again
    returns = []

    def go_on(to):
        nonlocal now, on, work
        while now < to:
            while returns and returns[0][0] <= now:
                when, replica = heapq.heappop(returns)
                if out.get(replica) == when:
                    del out[replica]
            until = min([to] + [r[0] for r in returns[:1]] + ([stalled_until] if stalled_until > now else []))
            if now >= stalled_until and len(out) < c.replicas:
                on += until - now
                work += (until - now) * (c.replicas - len(out)) / c.replicas
            now = until

    for at, kind, replica in trace_of(days, c):
        if at > end:
            break
        go_on(at)
        if replica not in out:
            stalled_until = max(stalled_until, at + stall_of(kind))
            work -= c.step_s / 2 / c.replicas  # what it had done of the step
        out[replica] = at + back_after
        heapq.heappush(returns, (out[replica], replica))
    go_on(end)
    return on / end, work / end


def ft_hsdp(days, c, _):
    return by_replica(days, c, lambda kind: c.ft_stall_min * 60, c.restart_min * 60)


def rejoin(days, c, sim):
    return by_replica(days, c, lambda kind: stall_s(kind, c, sim), c.restart_min * 60 + c.state_gb / c.catch_up_gb_s)


SYSTEMS = [("fully synchronous restart", synchronous), ("FT-HSDP, published stall", ft_hsdp), ("Rejoin", rejoin)]
SWEEPS = [("mtbf_min", "mean time between failures", [3, 5, 8, 12, 18, 30, 60, 120, 240]),
          ("restart_min", "restart of what was lost", [1, 2, 3, 5, 10, 15, 20, 30]),
          ("replicas", "replicas", [4, 6, 8, 12, 16, 24, 48, 96]), ("step_s", "a step", [1, 2, 5, 6.2, 10, 20, 60]),
          ("checkpoint_min", "between checkpoints (synchronous)", [1, 2, 5, 10, 20, 30]),
          ("ft_stall_min", "FT-HSDP's stall for each failure", [0.25, 0.5, 1, 2, 3, 5, 8]),
          ("silence_s", "silence", [0.2, 0.5, 1, 2, 5, 10, 30, 60]),
          ("hang_share", "share of failures noticed by silence", [0, 0.1, 0.25, 0.5, 0.75, 1.0]),
          ("exit_ms", "an exit, until the others go on", [2, 5, 10, 20, 100, 1000, 10000]),
          ("decide_ms", "the coordinator's decision", [1, 7, 50, 200, 1000, 10000]),
          ("catch_up_gb_s", "catch-up of a rank", [0.001, 0.003, 0.01, 0.03, 0.1, 1, 10]),
          ("ring_gb_s", "all-reduce", [0.05, 0.2, 1, 5, 20, 50]),
          ("state_gb", "state of a rank", [0.1, 0.5, 1.38, 5, 20, 80]),
          ("gradient_gb", "gradients of a rank", [0.01, 0.05, 0.198, 1, 5]),
          ("log_ms", "the coordinator's write to disk", [0.1, 1, 3, 10, 100, 1000]),
          ("hops_ms", "messages on their way", [0.1, 1, 10, 100, 1000])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=54)
    parser.add_argument("--seeds", type=int, default=100, help="of the simulator, for each kind of failure")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs", help="folder for both files")
    arguments = parser.parse_args()
    sim, base = simulated(arguments.seeds), Constants()
    results = {name: system(arguments.days, base, sim) for name, system in SYSTEMS}
    published = {SYSTEMS[0][0]: "44 %", SYSTEMS[1][0]: "80 %"}

    lines = ["# Effective training time at 98,304 GPUs", "",
             "Written by `./run sim --effective-time`; don't edit. One trace of failures "
             f"({arguments.days:g} days, {len(trace_of(arguments.days, base))} failures), three systems, the same model (`sim/effective_time.py`).", "",
             "| system | time in which the job gets on | GPU time in steps that count | published |", "|---|---|---|---|"]
    for name, (on, work) in results.items():
        lines.append(f"| {name} | {on:.2%} | {work:.2%} | {published.get(name, '')} |")
        print(f"{name:28} gets on {on:7.2%} of the time, {work:7.2%} of all GPU time counts   {published.get(name, '')}")
    total = sum(count for _, count, _ in CAUSES)
    lines += ["", "The second column counts a replica that is out as lost for as long as it is out; no system here has spares.", "",
              "![what each constant changes](effective-time.svg)", "", "## What a failure costs the others in Rejoin", "",
              "| as | of 419 | simulated, of its silence | lost steps until all are back, simulated | stall with the constants below |", "|---|---|---|---|---|"]
    for kind in sorted({kind for _, _, kind in CAUSES}):
        count = sum(n for _, n, k in CAUSES if k == kind)
        lines.append(f"| {kind} | {count} ({count / total:.0%}) | {sim[kind]['silences']:.2f} | {sim[kind]['steps']:.1f} | "
                     f"{stall_s(kind, base, sim):.2f} s |")
    lines += ["", "An exit is not taken from the simulator, whose delays are invented, but from real processes. All stalls are counted in full, "
              "although most failures are noticed while the others still compute.", "",
              "Causes, and what each was taken for: " + "; ".join(f"{name} ({count}): {kind}" for name, count, kind in CAUSES) + ".", "",
              "## Constants", "", "| constant | value | source |", "|---|---|---|"]
    for field, (name, unit, source) in SOURCES.items():
        lines.append(f"| {name} | {f'{getattr(base, field):g} {unit}'.strip()} | {source} |")
    lines += ["", "Left out of the model: correlated failures (a switch that takes several replicas), spares, failures of the coordinator "
              "(a restart costs one stall of its own: " f"{sim['kill_coordinator']['stall_ms']:.0f} ms in the simulator), "
              "the synchronous system's checkpoint writes, and what FT-HSDP's survivors recompute.", ""]
    (arguments.out / "effective-time.md").write_text("\n".join(lines))

    charts = []
    for field, name, values in SWEEPS:
        chart = plot.Chart(name, "" if field == "hang_share" else SOURCES[field][1], "GPU time in steps that count, %",
                           log=field != "hang_share", low=0, high=100,
                           marks=[getattr(base, field)] if getattr(base, field) >= 0 else ())
        for system, run in SYSTEMS:
            chart.line(system, [(v, 100 * run(arguments.days, replace(base, **{field: v}), sim)[1]) for v in values])
        charts.append(chart)
    (arguments.out / "effective-time.svg").write_text(
        plot.page("Effective training time at 98,304 GPUs, each constant alone", charts, columns=4,
                  notes=["Dashed: the value of the table in effective-time.md. Written by sim/effective_time.py."]))
    print(f"effective-time.md and effective-time.svg are written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
