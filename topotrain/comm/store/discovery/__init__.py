"""Which process is which: environments of launchers, generations, ranks, registered jobs."""
