"""File formats of a checkpoint. Pure: a format says which bytes a file holds, in order; others write and read them."""
