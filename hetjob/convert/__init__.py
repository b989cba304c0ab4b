"""From a script to the plan of a heterogeneous job: launches are read, `convert.py` decides, `render.py` writes."""
