"""What holds for every test: one compute thread per process (their number changes bits), no deadline by the clock."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch; child processes inherit it

from hypothesis import HealthCheck, settings

# A shared machine is slow at times; a failing example is printed in a form that can be run again.
settings.register_profile("topotrain", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("topotrain")
