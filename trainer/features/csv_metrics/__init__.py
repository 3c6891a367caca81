"""CSV files of the metrics of a run."""
