"""Saving the state of a run and finding it again. Knows an `Engine`, never which one."""
