"""Identify processes: launchers' environments, generations, ranks, jobs."""
