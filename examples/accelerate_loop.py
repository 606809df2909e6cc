"""Handwritten digits in a loop of Hugging Face accelerate. The line marked `# topotrain` is all that was changed.

python examples/accelerate_loop.py                                        # one process
topotrain run examples/conf/sandblaster.conf examples/accelerate_loop.py  # the same file, under a topology
"""

import argparse

import torch
from digits import accuracy, build_model, read_digits
from torch import nn
from torch.utils.data import DataLoader

from topotrain.compat.integrations.accelerate import Accelerator  # topotrain (was: from accelerate import Accelerator)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="workspace/accelerate.pt")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = read_digits()
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
    loader = DataLoader(train, batch_size=32, shuffle=True)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    for _ in range(options.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    accelerator.print(f"accuracy: {accuracy(model, test):.3f}")
    accelerator.save(accelerator.unwrap_model(model).state_dict(), options.out)


if __name__ == "__main__":
    main()
