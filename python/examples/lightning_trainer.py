"""The GPT as a replica of a job, under PyTorch Lightning.

rejoin-run --replicas 3 --batch 16 --steps 300 -- python lightning_trainer.py data/shakespeare.txt --steps 300
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from ddp import Bytes, Gpt
from torch.utils.data import DataLoader

import rejoin.torch as rj
from rejoin.lightning import RejoinCallback


class Module(lightning.LightningModule):
    def __init__(self, session: rj.Session, steps: int) -> None:
        super().__init__()
        self.gpt, self.session, self.steps = Gpt(), session, steps

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.gpt(x).flatten(0, 1), y.flatten())
        self.session.step.record(loss=loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        step = self.session.step
        if step.number % 10 == 0:
            print(f"step {step.number} loss {step.mean('loss'):.4f}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="the job's --steps")
    parser.add_argument("--checkpoint", type=Path, help="written every 100 steps; the job goes on from it")
    given = parser.parse_args()

    torch.manual_seed(0)
    session = rj.Session.from_environment()
    module, data = Module(session, given.steps), Bytes(given.data)
    loader = DataLoader(data, batch_sampler=session.batches(len(data)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=given.steps,
        gradient_clip_val=1.0,
        callbacks=[RejoinCallback(session, checkpoint=given.checkpoint, every_n_steps=100, metrics=["loss"])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, session.data(loader, steps=given.steps))
    with session.final_save("gpt.pt") as mine:
        if mine:
            torch.save(module.gpt.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
