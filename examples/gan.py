"""A GAN: a generator learns to place points as eight clouds on a circle, from a discriminator that learns beside it.

    python examples/gan.py                                         # one process
    topotrain run examples/conf/sandblaster.conf examples/gan.py   # the same file, under a topology

Two models have an optimizer each and take turns. The picture at the end shows where the generated points are; a good
generator reaches all eight clouds, and few of its points lie between them.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import topotrain as tt

CLOUDS, RADIUS, SPREAD, NOISE = 8, 2.0, 0.15, 8


def centers() -> Tensor:
    """Return the middle of each cloud: [clouds, 2]."""
    angle = torch.arange(CLOUDS) * 2 * math.pi / CLOUDS
    return RADIUS * torch.stack([angle.cos(), angle.sin()], dim=1)


def points(count: int) -> TensorDataset:
    """Return points of all clouds."""
    made = torch.Generator().manual_seed(1)
    cloud = torch.randint(CLOUDS, (count,), generator=made)
    return TensorDataset(centers()[cloud] + SPREAD * torch.randn(count, 2, generator=made))


def layers(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.LeakyReLU(0.2)),
        *(nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, outputs),
    )


@torch.no_grad()
def generate(generator: nn.Module, count: int = 2000) -> Tensor:
    """Return the same points for the same generator: [count, 2]."""
    generated: Tensor = generator(torch.randn(count, NOISE, generator=torch.Generator().manual_seed(2)))
    return generated


def quality(generated: Tensor) -> tuple[int, float]:
    """Return how many clouds have points, and the share of points in clouds (at most 3 deviations from a middle)."""
    distance, cloud = torch.cdist(generated, centers()).min(dim=1)
    inside = distance < 3 * SPREAD
    reached = torch.bincount(cloud[inside], minlength=CLOUDS) > len(generated) / CLOUDS / 10
    return int(reached.sum()), inside.float().mean().item()


def picture(generated: Tensor, rows: int = 17) -> str:
    """Draw the points as a map of characters: the more points, the darker."""
    columns, edge = 2 * rows, 1.3 * RADIUS
    place = ((generated + edge) / (2 * edge) * torch.tensor([columns, rows])).long()
    inside = ((place >= 0) & (place < torch.tensor([columns, rows]))).all(dim=1)
    cells = torch.bincount(place[inside, 1] * columns + place[inside, 0], minlength=rows * columns)
    shades = [" .:+#"[min(4, (cell + 3) // 4)] for cell in cells.tolist()]
    return "\n".join("".join(shades[row * columns :][:columns]) for row in reversed(range(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to place points as eight clouds.")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128, help="points per step, over all workers of a group together")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of both models")
    options = parser.parse_args()

    torch.manual_seed(0)
    G, D = layers(NOISE, 2), layers(2, 1)
    opt_g = torch.optim.Adam(G.parameters(), lr=options.rate, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(D.parameters(), lr=options.rate, betas=(0.5, 0.9))
    loader = DataLoader(points(4096), batch_size=options.batch, shuffle=True)
    loss_of = binary_cross_entropy_with_logits

    G, D, opt_g, opt_d, loader = tt.prepare(G, D, opt_g, opt_d, loader)
    for epoch in tt.epochs(options.epochs):
        for (real,) in loader:
            # The discriminator learns to tell real points from generated ones …
            generated = G(torch.randn(len(real), NOISE))
            opt_d.zero_grad()
            scores, ones = D(torch.cat([real, generated.detach()])), torch.ones(len(real), 1)
            loss_of(scores, torch.cat([ones, 0 * ones])).backward()
            opt_d.step()

            # … and the generator to place points that the discriminator takes for real.
            opt_g.zero_grad()
            loss_of(D(generated), ones).backward()
            opt_g.step()
        if tt.is_main() and epoch % 10 == 9:
            reached, share = quality(generate(G))
            print(f"epoch {epoch + 1}: {reached} of {CLOUDS} clouds, {share:.0%} of the points in them", flush=True)

    def clouds() -> float:
        """Called once, with the final parameters of the job."""
        print(picture(generate(G)), flush=True)
        return quality(generate(G))[0]

    tt.report(clouds=clouds, in_clouds=lambda: quality(generate(G))[1])


if __name__ == "__main__":
    main()
