"""Training rows that files name are left out: the key `data.leave_out`."""
