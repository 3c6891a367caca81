"""Pipeline parallelism: the schedule of the stages, and stand-ins for the modules of other stages."""
