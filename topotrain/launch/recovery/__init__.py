"""Recovery from process deaths, and changes of a job's size."""
