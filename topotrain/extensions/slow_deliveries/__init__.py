"""Messages that are slowed down and reported one by one, to show how a job trains."""
