"""The side of the flash checkpoint that knows torch: what a program calls. The checkpoint writer never imports it."""
