"""The report: one self-contained HTML page about the calibration of predictions."""
