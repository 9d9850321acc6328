"""`tsx monitor`: baselines, drift, quality, groups and contested answers of models."""

POSITION = 85
SUMMARY = "Baselines, drift, quality and contested answers of models; a report for a review."
