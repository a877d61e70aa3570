"""`crosscut plan`: three commands behind one name, a forecast of layouts, a calibration and a dry run."""
