"""`outrider audit`: whether an engine's speculation is lossless, and what it is worth. Requests, sides, statistics, card."""
