"""Plan a job before it starts."""
