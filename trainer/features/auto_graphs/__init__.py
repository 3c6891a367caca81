"""CUDA graphs by choice: `cuda_graphs: auto` captures the passes of runs in which a GPU waits for the host."""
