#!/usr/bin/env python3
"""What zstd and the all-reduce's coding leave of a small GPT's gradients, how fast, and what coding loses.

usage: gradient_codecs.py [--steps 1,100,1000] [--width 128] [--blocks 4] [--batch 8] [--json FILE]

One process trains the model of python/examples/nanogpt.py on data/shakespeare.txt, and keeps the gradients of those
steps, as its replicas would all-reduce them. bench/gradient_codecs.cc codes them, on one core, in chunks of 1 MiB: as
float32 and rounded to bfloat16. zstd loses nothing; it is also tried on the elements' first bytes, then their second
ones, and so on. Needs the package (build/python-venv after ./run test or ./run demo --torch).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
CODECS = ROOT / "build/release/bin/rejoin_gradient_codecs"
sys.path.insert(0, str(ROOT / "python/examples"))
from ddp import Bytes, Gpt  # noqa: E402
from nanogpt import PEAK, rate  # noqa: E402


def gradients(given, steps):
    """Of each of these steps: all, one after the other."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, data = Gpt(given.width, given.blocks), Bytes(ROOT / "data/shakespeare.txt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, max(steps) + 1):
        at = torch.randint(len(data), (given.batch,))
        x, y = torch.utils.data.default_collate([data[int(i)] for i in at])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if step in steps:
            yield step, loss.item(), torch.cat([one.grad.flatten() for one in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, max(steps))
        optimizer.step()
        optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", default="1,100,1000")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json")
    given = parser.parse_args()
    if not CODECS.exists():
        sys.exit(f"{CODECS} is not there: ./run build release")
    results = []
    for step, loss, flat in gradients(given, {int(one) for one in given.steps.split(",")}):
        with tempfile.NamedTemporaryFile() as file:
            file.write(flat.numpy().tobytes())
            file.flush()
            told = json.loads(subprocess.run([CODECS, file.name], check=True, capture_output=True, text=True).stdout)
        print(f"step {step}, loss {loss:.3f}, {len(flat):,} gradients, {told['instructions']}")
        print("type      codec                left  encode GB/s  decode GB/s  error")
        for row in told["rows"]:
            results.append(row | {"step": step})
            error = f"{row['error'] * 100:.2f} %" if row["error"] else "none"
            print(f"{row['type']:9} {row['codec']:20} {row['left'] * 100:3.0f} %  {row['encode_bytes_per_second'] * 1e-9:11.2f}"
                  f"  {row['decode_bytes_per_second'] * 1e-9:11.2f}  {error}", flush=True)  # fmt: skip
    if given.json:
        Path(given.json).write_text(json.dumps({"width": given.width, "blocks": given.blocks, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
