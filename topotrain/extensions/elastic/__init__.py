"""Worker groups that restart, leave and join while a job runs."""
