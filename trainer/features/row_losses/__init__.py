"""Loss and margin of each training row at each epoch, which a run collects without another pass."""
