"""A process of a job: its workers or servers, and its control channel to the unit."""
