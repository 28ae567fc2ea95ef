"""The recipe of Pyrite, the bundled model: corpus, tokenizer, pretraining, drafters and their figures. See README.md."""
