"""Curves of a job in MLflow: topotrain run --log python:examples.track_mlflow:MLflow JOB.conf train.py

MLflow writes where MLFLOW_TRACKING_URI says: a server, or a folder of this machine.
"""

import mlflow

import topotrain as tt


class MLflow(tt.Tracker):
    """A run of MLflow for each job."""

    def start(self, job):
        mlflow.start_run(run_name=job["name"], tags={"framework": job["framework"]})

    def log(self, step, values):
        mlflow.log_metrics(values, step)

    def end(self, code):
        mlflow.end_run("FAILED" if code else "FINISHED")
