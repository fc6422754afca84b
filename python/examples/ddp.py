"""A small GPT that learns to predict Shakespeare's next byte: one replica of a Rejoin job.

rejoin-run --replicas 3 --batch 16 --steps 300 -- python ddp.py data/shakespeare.txt
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rejoin.torch as rj

CONTEXT = 64


class Bytes(Dataset):
    """Each sample is a window of bytes, and the same one byte later."""

    def __init__(self, file: Path) -> None:
        self.bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.bytes) - CONTEXT - 1

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.bytes[at : at + CONTEXT], self.bytes[at + 1 : at + CONTEXT + 1]


class Gpt(nn.Module):
    """Token and position embeddings, some blocks, and the tied output."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.out.weight = self.token.weight
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.out(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session = rj.Session.from_environment()
    session.attach(model, optimizer, max_norm=1.0, metrics=["loss"])
    data = Bytes(given.data)
    loader = DataLoader(data, batch_sampler=session.batches(len(data)))
    for step, (x, y) in session.steps(loader):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        step.record(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 10 == 0:
            print(f"step {step.number} loss {step.mean('loss'):.4f}", flush=True)
    with session.final_save("gpt.pt") as mine:
        if mine:
            torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
