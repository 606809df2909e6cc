"""What a job will look like, before it starts."""
