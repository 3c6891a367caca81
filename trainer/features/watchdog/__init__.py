"""The watchdog: it ends a run without progress, with the position of each rank."""
