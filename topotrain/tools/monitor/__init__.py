"""Windows on a running job: each takes the events of events.py, one call per event, and changes nothing in the job.

`progress` shows the job while it runs, `report` adds it up, `table` and `plot` show results,
`compare` runs several jobs.
"""
