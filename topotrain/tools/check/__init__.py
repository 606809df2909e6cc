"""`topotrain check`: is a job the plain script? Runs some steps of both and compares them."""
