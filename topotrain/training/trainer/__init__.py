"""The Trainer: a training loop driven by the job file."""
