"""Files of a checkpoint: their content, and strict reading of files that anybody may have written."""
