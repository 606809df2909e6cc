"""`topotrain check`: compare some steps of a job with those of the plain script."""
