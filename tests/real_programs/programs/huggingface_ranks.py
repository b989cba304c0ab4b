"""The Hugging Face Trainer with two ranks, samples grouped by length and kept workers; it resumes in mid-epoch."""

import sys
import warnings
from pathlib import Path

import ledger
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Sentences(Dataset):
    def __init__(self, first, num_samples):
        self.first = first
        self.lengths = torch.randint(2, 12, (num_samples,), generator=torch.Generator().manual_seed(1)).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        words = torch.rand(self.lengths[index])  # as if a noise were added to the embedding
        return {"input_ids": words, "index": self.first + index}


def pad(samples):
    width = max(len(one["input_ids"]) for one in samples)
    values = torch.stack(
        [torch.nn.functional.pad(one["input_ids"], (0, width - len(one["input_ids"]))) for one in samples]
    )
    return {"values": values, "index": torch.tensor([one["index"] for one in samples])}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, values, index):
        ledger.step("training" if self.training else "evaluation", index, values)
        return {"loss": (self.weight * values).square().mean(), "logits": values.mean(1)}


def make_trainer(directory, **options):
    arguments = TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        num_train_epochs=2,
        save_steps=11,
        save_only_model=False,
        eval_strategy="epoch",
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=4,
        train_sampling_strategy="group_by_length",
        label_names=["index"],
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        logging_strategy="no",
        seed=7,
        **options,
    )
    model = Model()
    return Trainer(
        model=model, args=arguments, train_dataset=Sentences(0, 64), eval_dataset=Sentences(1000, 16), data_collator=pad
    )


def main(directory):
    warnings.simplefilter("ignore")
    make_trainer(directory, max_steps=13).train()
    make_trainer(directory).train(resume_from_checkpoint=str(directory / "checkpoint-11"))
    ledger.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
