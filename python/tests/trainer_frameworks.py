"""A trainer of each framework for the tests: it writes down each step, and what the framework counts."""

import argparse
import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import rejoin.torch as rj

EMA = 0.9


class Tokens(Dataset):
    def __init__(self, size: int = 256) -> None:
        self.x = torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.x[at], "labels": self.x[at]}


class Gpt(torch.nn.Module):
    """Of torch alone, with dropout; it takes and gives what a model of transformers does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = torch.nn.Embedding(64, 32)
        self.block = torch.nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True)
        self.out = torch.nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.out(self.block(self.token(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def rate(step: int) -> float:
    """As that of a LambdaLR, whose steps count from 0."""
    return min(1.0, (step + 1) / 5)


def tell(session: rj.Session, counted: int, given: argparse.Namespace, more: str = "") -> None:
    step = session.step
    sys.stdout.write(
        f"step {step.number} counted {counted} lr {session.last_lr[0]:.6f} norm {session.last_norm:.6f} "
        f"digest {session.state_digest():016x} pid {os.getpid()} {more}\n"
    )
    sys.stdout.flush()
    if not os.path.exists(f"{given.out}/fast"):
        time.sleep(given.slow)


def transformers(session: rj.Session, given: argparse.Namespace) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

    from rejoin.transformers import RejoinCallback, RejoinTrainer

    class Tells(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            tell(session, state.global_step, given, f"epoch {state.epoch:.4f}")

        def on_log(self, args, state, control, logs, **_):
            print(f"log of step {state.global_step}: {logs}", flush=True)

    torch.manual_seed(0)
    size = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **size))
    arguments = TrainingArguments(
        given.out, max_steps=given.steps, learning_rate=1e-3, lr_scheduler_type="cosine", warmup_steps=5,
        gradient_accumulation_steps=given.micro_batches, logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
        eval_strategy="steps", eval_steps=10, save_strategy="steps", save_steps=10, bf16=given.bf16,
    )  # fmt: skip
    callback = RejoinCallback(session, checkpoint=given.checkpoint, ema=EMA)
    trainer = RejoinTrainer(
        model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(32), callbacks=[callback, Tells()]
    )
    ended = trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"ended at {ended.global_step}, finished {session.finished}", flush=True)


def lightning(session: rj.Session, given: argparse.Namespace) -> None:
    import lightning

    from rejoin.lightning import RejoinCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = Gpt()
            self.automatic_optimization = not given.manual

        def training_step(self, batch, index):
            loss = self.gpt(**batch)["loss"]
            if given.manual:
                self.manual_backward(loss)
                if (index + 1) % given.micro_batches == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
                return None
            return loss

        def validation_step(self, batch, index):
            if session.step is not None and index == 0:  # not the one before the loop
                averages = [(one.value, one.view(one.columns[-1])) for one in session._tensors if one.averaged]
                same = all(torch.equal(value, average) for value, average in averages)
                print(f"validated {len(averages)} averages: {same}", flush=True)
            self.log("held_out", self.gpt(**batch)["loss"])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Tells(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if (index + 1) % given.micro_batches == 0:
                tell(session, trainer.global_step, given)

    accumulates = {} if given.manual else {"accumulate_grad_batches": given.micro_batches, "gradient_clip_val": 1.0}
    settings = {"max_norm": 1.0} if given.manual else {}
    callback = RejoinCallback(session, checkpoint=given.checkpoint, every_n_steps=10, ema=EMA, **settings)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=given.steps, callbacks=[callback, Tells()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=1, check_val_every_n_epoch=None,
        val_check_interval=10 * given.micro_batches, precision="bf16-mixed" if given.bf16 else "32-true", **accumulates,
    )  # fmt: skip
    loader = DataLoader(Tokens(), batch_sampler=session.batches(len(Tokens())))
    feed = session.data(loader, steps=given.steps, micro_batches=given.micro_batches)
    trainer.fit(module := Module(), feed, DataLoader(Tokens(32), batch_size=8))
    with session.final_save(f"{given.out}/result.pt") as mine:
        if mine:
            torch.save(module.gpt.state_dict(), f"{given.out}/result.pt")
    print(f"ended at {trainer.global_step}, finished {session.finished}", flush=True)


def accelerate(session: rj.Session, given: argparse.Namespace) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=given.micro_batches, mixed_precision="bf16" if given.bf16 else "no"
    )
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Tokens(), batch_sampler=session.batches(len(Tokens())))
    model, optimizer = accelerator.prepare(model, optimizer)
    session.attach(
        accelerator.unwrap_model(model), optimizer.optimizer, max_norm=1.0, lr=lambda step: 1e-3 * rate(step - 1)
    )
    torch.manual_seed(100 + session.replica)
    for number, batch in enumerate(session.data(loader, micro_batches=given.micro_batches)):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        if (number + 1) % given.micro_batches == 0:
            tell(session, session.committed, given)
    with session.final_save(f"{given.out}/result.pt") as mine:
        if mine:
            torch.save(accelerator.unwrap_model(model).state_dict(), f"{given.out}/result.pt")
    print(f"ended at {session.committed}, finished {session.finished}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["transformers", "lightning", "accelerate"])
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--slow", type=float, default=0.0, help="seconds that a step takes longer, until there is a file 'fast'"
    )
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint")
    given = parser.parse_args()
    globals()[given.framework](rj.Session.from_environment(), given)


if __name__ == "__main__":
    main()
