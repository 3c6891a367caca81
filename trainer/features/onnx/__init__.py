"""Graphs for ONNX Runtime: `trainer export --to onnx`."""
