"""Update of the weights: learning rates, AdamW and Muon, and the moving average."""
