"""Training of drafters for a target: text to tokens, distillation, one loop, export.

Nothing is imported here: the command line must start without torch.
"""
