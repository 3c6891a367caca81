"""`trainer predict`: one output row for each row of a file, in chunks that survive a kill."""
