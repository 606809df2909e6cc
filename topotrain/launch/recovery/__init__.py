"""What happens when a process of a job dies."""
