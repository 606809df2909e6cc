"""Programs around a job: command line, monitor, planner, simulator, faults."""
