"""A module whose import takes longer than any test waits."""

import time

time.sleep(600)
