"""Access to the operating system: files, locks on folders, facts about the machine, and the terminal."""
