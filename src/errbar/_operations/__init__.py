"""Operations on posteriors and predictions: calibration, priors, outliers, decisions, fusion."""
