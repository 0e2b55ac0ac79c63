"""Graphs that predict without errbar: ONNX and torch.export."""
