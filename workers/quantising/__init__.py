"""Making a checkpoint smaller: calibration, scales, rounding, and the files that come of it."""
