"""What speculation is worth before it is run: formulas, measured profiles, predictions, and a simulation of the controller."""
