"""Readers of files of rows, one for each format: JSON, also compressed by gzip."""
