"""A tiny GPT-2 learns to add, with the Trainer of Hugging Face. The line marked `# topotrain` is all that was changed.

    python examples/huggingface.py                                        # one process
    topotrain run examples/conf/sandblaster.conf examples/huggingface.py  # the same file, under a topology

Nothing is downloaded: the model is made from its configuration.
"""

import argparse
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from topotrain.compat.integrations.transformers import Trainer  # topotrain (was: from transformers import Trainer)

SIGNS = "0123456789+=."


class Sums(torch.utils.data.Dataset):
    """Texts like `7+48=55.`, of different lengths; what is predicted is the part after `=`."""

    def __init__(self, count: int, seed: int) -> None:
        dice = random.Random(seed)
        pairs = [(dice.randrange(100), dice.randrange(100)) for _ in range(count)]
        self.texts = [f"{a}+{b}={a + b}." for a, b in pairs]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        return [SIGNS.index(sign) for sign in self.texts[index]]


def collate(items: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest text; no loss for the sum itself and for what was added at the end."""
    longest = max(map(len, items))
    equals = SIGNS.index("=")
    rows = [item + [0] * (longest - len(item)) for item in items]
    labels = [
        [-100] * (item.index(equals) + 1) + item[item.index(equals) + 1 :] + [-100] * (longest - len(item))
        for item in items
    ]
    masks = [[1] * len(item) + [0] * (longest - len(item)) for item in items]
    named = {"input_ids": rows, "labels": labels, "attention_mask": masks}
    return {name: torch.tensor(values) for name, values in named.items()}


def build_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=len(SIGNS),
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to add.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--optim", default="adamw_torch", help="as in TrainingArguments")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--out", default="workspace/huggingface")
    options = parser.parse_args()

    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=2,
        optim=options.optim,
        learning_rate=options.rate,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=build_model(),
        args=arguments,
        data_collator=collate,
        train_dataset=Sums(options.samples, seed=1),
        eval_dataset=Sums(100, seed=2),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
