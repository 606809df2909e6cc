"""Two hosts on a link of 100 Mbit/s: `two_hosts` with another link, and a table of its own."""

from functools import partial

from benchmarks.record import run_table
from benchmarks.two_hosts import declare, measure

if __name__ == "__main__":
    run_table("two_slow_hosts", "Two hosts on a slow link", measure, partial(declare, mbit=100.0))
