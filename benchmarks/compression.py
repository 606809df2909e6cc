"""What compression costs, beside a copy: `python -m benchmarks.compression [--rounds N]`.

Rule: bodies of 1 MB, as buckets are; 4.5 MB of float32 gradients, encoded and decoded one after another in memory that
is there already. One thread. All ways take turns (A B A B ...) with a plain copy of the same bodies; a
ratio of 3 means "as long as copying three times". What came back is compared after the last round.

    codec      encode and decode alone
    feedback   the residual added, encoded, and what is left kept; decoded on the other side
    stream     values: the difference to what was shown, encoded and shown; added on the other side

The remark gives the speed of a link below which an encoding pays: where encoding and decoding together take less time
than the link saves, with nothing overlapped.
"""

import argparse
import time
from collections.abc import Callable

import torch

from benchmarks.harness import ROUNDS, Row, interleave, row
from benchmarks.record import run_table
from topotrain.config.job import Compression
from topotrain.extensions.compression.codecs import Codec
from topotrain.extensions.compression.error_feedback import DeltaStream, ErrorFeedback, codec_for

BODY = 1 << 18  # elements
NUMEL, SIZE = 1_125_000, "4.5 MB"
KINDS = {
    "kFp16": (Compression.kFp16, 1.0),
    "kBf16": (Compression.kBf16, 1.0),
    "kInt8": (Compression.kInt8, 1.0),
    "kE3M0": (Compression.kE3M0, 1.0),
    "kTopK 1 %": (Compression.kTopK, 0.01),
    "kTopK 10 %": (Compression.kTopK, 0.1),
}


class Bodies:
    """Gradients in bodies of 1 MB, and all the memory that one kind needs for them."""

    def __init__(self, kind: str) -> None:
        compression, ratio = KINDS[kind]
        codec = codec_for(compression, torch.float32, ratio)
        assert codec is not None
        self.codec: Codec = codec
        flat = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
        self.given = [flat[lo : lo + BODY] for lo in range(0, NUMEL, BODY)]
        self.turned = [x.flip(0) for x in self.given]
        self.shown = self.turned
        self.out = [torch.zeros_like(x) for x in self.given]
        self.data = [torch.zeros(codec.size(x.numel()), dtype=torch.uint8) for x in self.given]
        self.feedback = [ErrorFeedback(codec, torch.zeros_like(x), torch.zeros_like(x)) for x in self.given]
        self.sent = [DeltaStream(codec, torch.zeros_like(x)) for x in self.given]
        self.received = [DeltaStream(codec, torch.zeros_like(x)) for x in self.given]

    def copy(self) -> None:
        for x, out in zip(self.given, self.out):
            out.copy_(x)

    def alone(self) -> None:
        for x, data, out in zip(self.given, self.data, self.out):
            self.codec.encode(x, data)
            self.codec.decode(data, out)

    def with_feedback(self) -> None:
        for x, data, out, feedback in zip(self.given, self.data, self.out, self.feedback):
            feedback.encode(x, data)
            feedback.settle()
            self.codec.decode(data, out)

    def values(self) -> None:
        self.shown = self.turned if self.shown is self.given else self.given  # or there would be nothing to send
        for x, data, sent, received in zip(self.shown, self.data, self.sent, self.received):
            sent.encode(x, data)
            received.decode(data)

    def check(self) -> None:
        """What came back is what an encoding may make of it, and both copies of the values are the same."""
        self.alone()
        for x, out, sent, received in zip(self.given, self.out, self.sent, self.received):
            if not torch.equal(sent.held, received.held):
                raise AssertionError("the two copies of the values differ")
            if torch.linalg.vector_norm(x - out) >= torch.linalg.vector_norm(x):
                raise AssertionError("what came back is not what was sent")

    @property
    def share(self) -> float:
        return sum(data.numel() for data in self.data) / sum(4 * x.numel() for x in self.given)


def clocked(run: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    return measure


def measure(options: argparse.Namespace) -> list[Row]:
    """All kinds and ways."""
    torch.set_num_threads(1)
    plain = Bodies("kFp16")
    bodies = {kind: Bodies(kind) for kind in KINDS}
    sides = {"copy": clocked(plain.copy)}
    for kind, its in bodies.items():
        for way, run in (("codec", its.alone), ("feedback", its.with_feedback), ("stream", its.values)):
            sides[f"{kind}, {way}, {SIZE}"] = clocked(run)
    samples = interleave(sides, options.rounds)
    for its in bodies.values():
        its.check()
    copied = samples.pop("copy")
    found = [row(f"a copy, {SIZE}", copied.figure, "ms")]
    for what, its_samples in samples.items():
        share = bodies[what.partition(",")[0]].share
        gbit = 32.0 * NUMEL * (1 - share) / (its_samples.median * 1e6)
        note = f"{its_samples.median:.2f} ms, {share:.1%} of the bytes, pays below {gbit:.0f} Gbit/s"
        found.append(row(what, its_samples.over(copied), "copies", note=note))
    return found


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=2 * ROUNDS, help=f"at least {ROUNDS}")


if __name__ == "__main__":
    run_table("compression", "What compression costs", measure, declare)
