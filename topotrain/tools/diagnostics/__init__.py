"""Reports about this installation, this machine and a job before its start."""
