"""Other people's training loops on a few steps, with each rank's part of the data: what each rank of the tests runs."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import maskwise as mw

STEPS, MICRO, ROWS, LENGTH, WORDS = 3, 2, 2, 6, 12
RATE = 0.3
IGNORED = -100


# -- the data: sequences of words, of which the first word and the padding have no label -------------------------------
def sequences(world):
    """As many as the steps, the ranks and their micro-batches take, with lengths that differ widely."""
    generator = torch.Generator().manual_seed(3)
    number = STEPS * world * MICRO * ROWS
    words = torch.randint(WORDS, (number, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (number,), generator=generator)
    # A micro-batch of which nothing is kept: a word that predicts nothing.
    lengths[:ROWS] = 1
    labels = words.where(torch.arange(LENGTH) < lengths[:, None], IGNORED)
    return [{"input_ids": a, "labels": b} for a, b in zip(words, labels, strict=True)]


class Net(nn.Module):
    """A tiny language model, which returns logits as those of transformers do."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, input_ids):
        return {"logits": self.head(self.embed(input_ids).tanh())}


def shifted(labels):
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def part_of_loss(net, batch, denominator):
    logits, labels = net(batch["input_ids"])["logits"], shifted(batch["labels"])
    return mw.loss(F.cross_entropy, logits, labels, labels != IGNORED, denominator=denominator)


def kept(batch):
    return shifted(batch["labels"]) != IGNORED


def stacked(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def in_one_process(world):
    """The parameters after all steps, each on its whole batch, and the loss of each step."""
    net, rows, losses = Net(), sequences(world), []
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    size = len(rows) // STEPS
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = part_of_loss(net, stacked(rows[step * size : (step + 1) * size]), None)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [p.tolist() for p in net.parameters()], losses


def parameters_of(net):
    return [p.tolist() for p in net.parameters()]


def place(base):
    """Where a trainer may write."""
    return os.path.join(base, f"rank{os.environ.get('RANK', '0')}")


# -- transformers ------------------------------------------------------------------------------------------------------
def by_trainer(world):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                losses.append(logs["loss"])

    losses, net = [], Net()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = TrainingArguments(
            output_dir=place(folder), use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICRO, max_grad_norm=0, logging_steps=1, report_to=[], save_strategy="no",
            train_sampling_strategy="sequential", disable_tqdm=True, ddp_backend="gloo", log_level="error",
            remove_unused_columns=False, logging_nan_inf_filter=False,
        )  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(
            net, arguments, train_dataset=sequences(world), data_collator=stacked, optimizers=(optimizer, constant),
            compute_loss_func=mw.distributed.trainer_loss(), callbacks=[Losses()],
        )  # fmt: skip
        # Its own models shift labels, and it counts accordingly; of another model, the labels come shifted.
        trainer.data_collator = lambda rows: {**(made := stacked(rows)), "labels": shifted(made["labels"])}
        trainer.train()
    return parameters_of(net), losses


# -- accelerate --------------------------------------------------------------------------------------------------------
def by_accelerate(world):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    loader = torch.utils.data.DataLoader(sequences(world), batch_size=ROWS, collate_fn=stacked)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    divided = accelerator.num_processes * accelerator.gradient_accumulation_steps
    losses = []
    for window, batches in mw.distributed.Windows(loader, MICRO, kept, average=divided):
        with window:
            for batch in batches[:-1]:
                with accelerator.no_sync(model):
                    accelerator.backward(part_of_loss(model, batch, window))
            accelerator.backward(part_of_loss(model, batches[-1], window))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(window.value().item())
    return parameters_of(net), losses


# -- lightning ---------------------------------------------------------------------------------------------------------
def by_lightning(world):
    import lightning

    class Module(mw.distributed.LightningMixin, lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def micro_step(self, batch, window):
            return part_of_loss(self.net, batch, window)

        def train_dataloader(self):
            rows, rank = sequences(world), int(os.environ.get("RANK", "0")) if world > 1 else 0
            micro = [rows[at : at + ROWS] for at in range(0, len(rows), ROWS)][rank::world]
            return mw.distributed.Windows([stacked(each) for each in micro], MICRO, kept)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            losses.append(self.trainer.callback_metrics["train_loss"].item())

    losses, module = [], Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
        )  # fmt: skip
        trainer.fit(module)
    return parameters_of(module.net), losses
