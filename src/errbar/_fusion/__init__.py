"""Several classifiers of one object, or several frames of it, as one: fused logits, fused classifiers and tracks."""
