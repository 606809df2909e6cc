"""Reports about this machine and this job, and the first files of a job."""
