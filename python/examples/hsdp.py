"""The GPT of ddp.py, divided by FSDP2 among the ranks of its replica: sharded inside, replicated by Rejoin across.

rejoin-run --replicas 2 --ranks 2 --batch 16 --steps 300 -- python hsdp.py data/shakespeare.txt
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ddp import Bytes, Gpt
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import rejoin.torch as rj


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--checkpoint", type=Path, help="a directory; the job goes on from what is there")
    given = parser.parse_args()
    if given.checkpoint:
        given.checkpoint.mkdir(parents=True, exist_ok=True)

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = Gpt().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = rj.Session.from_environment(device)
    session.attach(model, optimizer, max_norm=1.0, metrics=["loss"])
    if given.checkpoint and (given.checkpoint / "latest").exists():
        newest = given.checkpoint / (given.checkpoint / "latest").read_text()
        state = session.state_dict(of=newest)
        dcp.load(state, checkpoint_id=newest)
        session.load_state_dict(state)
    data = Bytes(given.data)
    loader = DataLoader(
        data, batch_sampler=session.batches(len(data), shard=dist.get_rank(), shards=dist.get_world_size())
    )
    for step, (x, y) in session.steps(loader):
        x, y = x.to(device), y.to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        step.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step.number} loss {step.mean('loss'):.4f}", flush=True)
        if given.checkpoint and step.number % 100 == 0 and step.leads:
            # Around all of it: who was put out meanwhile does not name an older one again.
            latest = rj.replacing(given.checkpoint / "latest") if dist.get_rank() == 0 else nullcontext()
            try:
                with session.busy("a checkpoint", seconds=60), latest as file:
                    dcp.save(session.state_dict(), checkpoint_id=given.checkpoint / str(step.number))
                    if file is not None:  # it is whole
                        file.write(str(step.number).encode())
            except dcp.CheckpointException as error:  # of a full disk, say, on all ranks: the state is worth more
                print(f"the checkpoint of step {step.number} is not written: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
