"""The Trainer: a loop that follows the job file."""
