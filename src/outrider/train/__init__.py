"""Training: corpus, tokenizer, one loop, and one file per thing trained.

Nothing is imported here, so that corpus workers start without loading torch.
"""
