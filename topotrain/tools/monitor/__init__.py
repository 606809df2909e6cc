"""Displays and reports of a running job.

Each takes the events of `core/events.py`, one call per event, and changes nothing in the job.

* `progress_display` shows the job while it runs.
* `job_report` adds it up.
* `result_tables` and `loss_curves` show results.
"""
