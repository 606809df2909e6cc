"""Worker groups that use one server, and the other server groups of a job."""
