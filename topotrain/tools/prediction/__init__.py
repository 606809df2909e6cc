"""What a cluster block costs before it runs: step time, links, waits, staleness."""
