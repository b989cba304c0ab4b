"""The tensors of a state, for saves, restores and conversions: taken apart, planned, copied, viewed, put together."""
