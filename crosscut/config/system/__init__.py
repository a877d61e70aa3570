"""Operating system below a run: files, locks on folders, facts about the machine, and the terminal."""
