"""The GPT of ddp.py, divided by FSDP2 among the ranks of its replica: sharded inside, replicated by Rejoin across.

rejoin-run --replicas 2 --ranks 2 --batch 16 --steps 300 -- python hsdp.py data/shakespeare.txt
"""

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from ddp import Bytes, Gpt
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import rejoin.torch as rj


class Named(dcp.FileSystemWriter):
    """Names the checkpoint in `latest` when it is whole. Where that fails, dcp.save() raises on all ranks."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.latest = ExitStack()

    def prepare_global_plan(self, plans):  # on rank 0
        # Before all of it: who was put out meanwhile does not name an older one again.
        self.file = self.latest.enter_context(rj.replacing(self.path.parent / "latest"))
        return super().prepare_global_plan(plans)

    def finish(self, metadata, results):  # on rank 0
        super().finish(metadata, results)
        self.file.write(self.path.name.encode())
        self.latest.close()


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
            writer = Named(given.checkpoint / str(step.number))
            try:
                with session.busy("a checkpoint", seconds=60), writer.latest:
                    dcp.save(session.state_dict(), storage_writer=writer)
            except dcp.CheckpointException as error:  # of a full disk, say, on all ranks: the state is worth more
                print(f"the checkpoint of step {step.number} is not written: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
