"""Keys of other tools: one JSON table for each tool, in its own spelling and with its defaults.

The readers are suggestions for unknown keys, the rules of `parallel.deepspeed`, `trainer convert` and the
documentation.
"""
