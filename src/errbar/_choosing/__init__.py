"""What to fit: `autofit` and `choose_prior`, by the scores of held-out data or by evidence."""
