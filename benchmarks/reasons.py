"""Why goals are not met, as far as it is known; written by hand from what was measured, and printed below the table."""

from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    "P1": "This machine copies 40 MB in 1.7 ms, so the fused update alone is 0.48 of the yardstick (3.8 of 7.8 "
    "ms). With two workers the canonical sum of two gradients is another 3 ms.",
    "P2": "Bare sockets that send 40 MB there and back at once take 17 to 23 ms here (`python -m "
    "benchmarks.transports`), more than twice the yardstick. Two workers move 4 x 40 MB through one server, "
    "Gloo moves 2 x 40 MB.",
    "P3": "Three ranks share two cores, and dividing by 3 is slower than multiplying by 1/2 or 1/4, which has "
    "the same bits only there.",
    "P4": "For the GPT, computing with an update of one's own and no exchange at all is 0.85 of "
    "DistributedDataParallel's step here: the goal is where nothing can be.",
    "P5": "Over TCP every gradient and every value crosses the loopback between two busy cores: 4 x 40 MB per "
    "step, where DistributedDataParallel moves 2 x 40 MB. On shared memory the spread of a run is wider "
    "than what is missing.",
    "P6": "One server updates for both groups and copies its values once for each, on the same two cores.",
    "P7": "The three healthy workers make 13 gradients while the slow one makes one, 3.25 at best; at 2.95 the rest is "
    "what older gradients cost in steps. The machine was not quite quiet.",
    "P9": "With one server less waiting is left to save since buckets have 64 KB: its step became faster by more "
    "than that of four.",
}
