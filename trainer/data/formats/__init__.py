"""Readers of files of rows, one for each format: JSON, CSV and Parquet, also compressed by gzip."""
