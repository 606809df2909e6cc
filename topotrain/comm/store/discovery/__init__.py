"""Identify processes: environments of launchers, generations, ranks, registered jobs."""
