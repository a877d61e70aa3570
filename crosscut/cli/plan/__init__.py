"""`crosscut plan`: forecasts of layouts, and with `--calibrate` or `--dry-run` a command of its own."""
