"""How `lmms-engine reproduce` works: what a run came from, running it again, and comparing the curves."""
