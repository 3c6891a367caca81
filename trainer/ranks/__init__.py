"""The processes of a run: how they were started, how they find each other, how they stop and report."""
