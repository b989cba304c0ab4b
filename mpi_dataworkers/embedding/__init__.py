"""Embedding tables on CPU nodes: rows lie on embedding servers, and trainers compute with them and update them."""
