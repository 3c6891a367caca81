"""Profiles of some steps of a run by torch's profiler: `logging.profile`."""
