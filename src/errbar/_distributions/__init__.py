"""What comes out: Gaussians over logits, their covariances, draws, and predictions."""
