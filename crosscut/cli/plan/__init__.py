"""`crosscut plan`: three commands under one name: the forecast, the calibration and the dry run."""
