"""`trainer init`: a first recipe from a file or a folder of data."""
