"""The side of the flash checkpoint that knows torch: what a program calls. The saver never imports it."""
