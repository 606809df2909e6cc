"""Inside a process of a job: its workers or servers, and its channel to the unit."""
