"""What is done with posteriors and predictions: calibration, priors, outliers, decisions, fusion."""
