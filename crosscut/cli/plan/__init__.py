"""`crosscut plan`, one name for three commands: the forecast, the calibration and the dry run."""
