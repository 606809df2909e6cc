"""Curves of a job in Weights & Biases: topotrain run --log python:examples.track_wandb:Wandb JOB.conf train.py

With WANDB_MODE=offline nothing leaves this machine, and `wandb sync` sends the run later.
"""

import wandb

import topotrain as tt


class Wandb(tt.Tracker):
    """A run of Weights & Biases for each job."""

    def start(self, job):
        self.run = wandb.init(project="topotrain", name=job["name"], config=job)

    def log(self, step, values):
        self.run.log(values, step=step)

    def end(self, code):
        self.run.finish(exit_code=code)
