"""Readers of files of rows, one for each format: JSON and CSV, also compressed by gzip."""
