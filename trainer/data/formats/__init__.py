"""Formats of files of rows, one reader for each: JSON, CSV, Parquet, Excel and CoNLL, also compressed by gzip."""
