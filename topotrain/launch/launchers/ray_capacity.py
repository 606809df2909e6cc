"""Capacity check: whether a Ray cluster could ever hold the units of a job.

It refuses only what is impossible. Capacity that is in use now may become free, so each node counts with its total
resources. This module is pure.
"""

from collections.abc import Iterator, Mapping, Sequence

Amounts = Mapping[str, float]
"""The amounts of CPU and GPU that a node has, or that a unit needs."""


def fits(nodes: Sequence[Amounts], bundles: Sequence[Amounts], strategy: str) -> bool:
    """Return False only if these units cannot fit on these nodes without other users."""
    if strategy == "STRICT_PACK":
        whole = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
        return any(_holds(node, whole) for node in nodes)
    # All bundles have the same number of GPUs, so CPUs decide the order.
    by_size = sorted(bundles, key=_cpus, reverse=True)
    if strategy == "STRICT_SPREAD":  # the largest units on the largest of the nodes that have enough GPUs
        large = sorted((n for n in nodes if n.get("GPU", 0.0) >= bundles[0].get("GPU", 0.0)), key=_cpus, reverse=True)
        return len(large) >= len(by_size) and all(map(_holds, large, by_size))
    # PACK and SPREAD are preferences. The smallest unit gives an upper bound, so no job that fits is refused.
    smallest = by_size[-1]
    alone = all(any(_holds(node, bundle) for node in nodes) for bundle in by_size)
    return alone and sum(_times(node, smallest) for node in nodes) >= len(by_size)


def better(nodes: Sequence[Amounts], bundles: Sequence[Amounts]) -> str:
    """Return the words for --pass with which the units fit; "" if none were found."""
    for strategy, cpus in _choices(nodes, bundles):
        asked = [{**bundle, "CPU": cpus} if cpus else bundle for bundle in bundles]
        if fits(nodes, asked, strategy):
            return f"--pass=strategy={strategy}" + (f" --pass=cpus={cpus:g}" if cpus else "")
    return ""


def _choices(nodes: Sequence[Amounts], bundles: Sequence[Amounts]) -> Iterator[tuple[str, float]]:
    """Yield strategies and CPUs per unit (0: unchanged), closest to the request first."""
    yield "SPREAD", 0.0
    yield "SPREAD", 1.0
    # As many CPUs as a node has for 1, 2, … units on it, rounded down to hundredths.
    for parts in range(1, len(bundles) + 1):
        yield "SPREAD", int(100 * max(map(_cpus, nodes), default=0.0) / parts) / 100


def _cpus(amounts: Amounts) -> float:
    return amounts.get("CPU", 0.0)


def _holds(node: Amounts, bundle: Amounts) -> bool:
    return all(node.get(kind, 0.0) >= amount for kind, amount in bundle.items())


def _times(node: Amounts, bundle: Amounts) -> int:
    """Return the number of such units that a node holds."""
    return int(min(node.get(kind, 0.0) / amount for kind, amount in bundle.items() if amount))
