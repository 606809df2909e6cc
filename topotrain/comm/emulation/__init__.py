"""Links with a given bandwidth, delay, jitter and loss, for measurements on one machine."""
