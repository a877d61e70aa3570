"""`crosscut plan`: the forecast, the calibration and the dry run, which are three commands with one name."""
