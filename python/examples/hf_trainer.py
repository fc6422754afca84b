"""A GPT of transformers as a replica of a job, under Hugging Face's Trainer.

rejoin-run --replicas 3 --batch 16 --steps 300 -- python hf_trainer.py data/shakespeare.txt --steps 300
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import rejoin.torch as rj
from rejoin.transformers import RejoinCallback, RejoinTrainer

CONTEXT = 64


class Bytes(Dataset):
    """Each sample is a window of bytes, which the model shifts by one itself."""

    def __init__(self, file: Path) -> None:
        self.bytes = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.bytes) - CONTEXT

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.bytes[at : at + CONTEXT], "labels": self.bytes[at : at + CONTEXT]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="the job's --steps")
    parser.add_argument("--checkpoint", type=Path, help="written every 100 steps; the job goes on from it")
    given = parser.parse_args()

    torch.manual_seed(0)
    size = {"n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))
    arguments = TrainingArguments(
        "gpt",
        max_steps=given.steps,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_steps=10,
        save_steps=100,
        save_strategy="steps" if given.checkpoint else "no",
        report_to=[],
        use_cpu=True,
    )
    session = rj.Session.from_environment()
    callback = RejoinCallback(session, checkpoint=given.checkpoint)
    trainer = RejoinTrainer(model=model, args=arguments, train_dataset=Bytes(given.data), callbacks=[callback])
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
